"""Whether two runs added every sum in one order, in which case a CPU gives them equal bits."""

from collections.abc import Iterable, Iterator

from pith.verify.record import Run


def differing_order(a: Run, b: Run) -> tuple[str, ...]:
    """Why the order of sums of two runs may differ, a line each; nothing where it is one order.

    What is compared is all that decides it on a CPU. The order in which a schedule runs its slots
    does not: gradients of micro-batches are added by their number. Which rank holds which layer
    does: the gradient norm and the router's losses are summed rank by rank.
    """
    first, second = _facts(a), _facts(b)
    named = {**first, **second}
    return tuple(_differences(first, second, list(named)))


def _differences(
    first: dict[str, object], second: dict[str, object], names: list[str]
) -> Iterator[str]:
    for name in names:
        mine, other = first.get(name), second.get(name)
        if mine != other:
            yield f"{name} {mine} against {other}"
        elif name == "device" and mine != "cpu":
            yield f"device {mine}"


def _facts(run: Run) -> dict[str, object]:
    recipe, mesh, told = run.recipe, run.mesh, run.environment
    variables = told.get("variables")
    threads = variables.get("OMP_NUM_THREADS") if isinstance(variables, dict) else None
    cores = f"those of {told.get('cpu_count')} cores over {mesh.world_size} ranks"
    return {
        "device": told.get("device"),
        "machine": told.get("machine"),
        "torch": told.get("torch"),
        "threads": threads or cores,
        "dp": mesh.dp,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "dp_shard": mesh.dp_shard or mesh.dp,
        "exchange": recipe.exchange_name,
        "micro_batch_size": recipe.training.micro_batch_size,
        "global_batch_size": recipe.training.global_batch_size,
        "operators": dict(sorted(recipe.operators.items())),
        "layers of each rank": _layers(run),
    }


def _layers(run: Run) -> str:
    """The layers that each pipeline rank holds, as ranges: "0-1,6-7 | 2-5"."""
    recipe = run.recipe
    if recipe.parallel.pp == 1:
        return _ranges([range(recipe.architecture.num_layers)])
    pipeline = recipe.pipeline(run.mesh.world_size)
    place, split = pipeline.table.placement, pipeline.split
    ranks = ([split[stage] for stage in place.stages(rank)] for rank in range(place.pp))
    return " | ".join(map(_ranges, ranks))


def _ranges(stages: Iterable[range]) -> str:
    """The stages of a rank: "0-2", of two stages "0-2,9-11"."""
    texts = (f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in stages if s)
    return ",".join(texts) or "none"
