"""A step through the trainer: its update, its means, its guard against what is not finite."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pith.checkpoint.shelf import Shelf
from pith.config import Recipe
from pith.data.loader import Batch
from pith.errors import RunFailedError
from pith.ops.cross_entropy import NOT_COUNTED
from pith.run.job import Job
from pith.run.stop import StopRequest
from pith.schedule.table import slot_text
from pith.train import loop
from pith.train.state import START
from pith.train.step import Trainer, sum_of_squares
from pith.verify.one_piece import Weights, initial, whole_batch
from pith.verify.share import joined
from tests.train.parity import (
    Outcome,
    assert_near,
    new_trainer,
    random_batch,
    recipe,
    steps,
    trainer_of,
    weights_of,
)

TOKENS = 6 * 8


def small(
    pp: int,
    schedule: str = "1f1b",
    *,
    num_layers: int = 4,
    precision: str = "float64",
    **sections: Any,
) -> Recipe:
    """A few layers, three micro-batches of two sequences of eight tokens, with changes."""
    sizes = {"num_hidden_layers": num_layers}
    base = recipe(pp=pp, schedule=schedule, micro_batches=3, precision=precision, **sizes)
    raw = base.model_dump()
    for section, values in sections.items():
        raw[section] |= values
    return Recipe.model_validate(raw)


def masters(trainer: Trainer) -> Weights:
    return {name: master.clone() for name, master in trainer.model.parameters.masters.items()}


def state(trainer: Trainer) -> list[Tensor]:
    """Everything that a step may change: weights, moments, counts of steps."""
    moments = trainer.model.optimizer.state
    return [
        tensor.clone()
        for master in trainer.model.parameters.masters.values()
        for tensor in (master, *moments[master].values())
    ]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    """Also where both hold the same NaN."""
    pairs = zip(some, others, strict=True)
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


def nothing_counts() -> Batch:
    batch = random_batch(6)
    return replace(batch, labels_NS=np.full_like(batch.labels_NS, NOT_COUNTED))


# One update


def two_steps(pp: int) -> dict[str, Outcome]:
    batches = [random_batch(6, seed=index) for index in range(2)]
    return {
        schedule: steps(small(pp, schedule, optimizer={"warmup_steps": 2}), batches)
        for schedule in ("1f1b", "dualpipev")
    }


def adamw_by_hand(recipe: Recipe, batches: list[Batch], rates: list[float]) -> Iterator[Any]:
    """Norm and weights after each step (arXiv 1711.05101); norms are the vectors, not decayed."""
    weights, m, v = initial(recipe), {}, {}
    for t, (batch, lr) in enumerate(zip(batches, rates, strict=True), start=1):
        whole = whole_batch(recipe, weights, batch)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in whole.grads.values()))
        for name, grad in whole.grads.items():
            clipped = grad * min(1.0, 0.5 / norm)
            m[name] = 0.9 * m.get(name, 0) + 0.1 * clipped
            v[name] = 0.95 * v.get(name, 0) + 0.05 * clipped**2
            decay = 0.1 if grad.ndim > 1 else 0.0
            root = (v[name] / (1 - 0.95**t)).sqrt() + 1e-8
            move = m[name] / (1 - 0.9**t) / root + decay * weights[name]
            weights[name] = weights[name] - lr * move
        yield whole.loss, norm, dict(weights)


@pytest.mark.parametrize("pp", [1, 2])
def test_two_steps_are_two_of_adamw_on_the_clipped_gradient_of_the_mean(run_ranks, pp):
    outcomes, case = run_ranks(pp, two_steps, pp), small(pp)
    batches = [random_batch(6, seed=index) for index in range(2)]
    by_hand = list(adamw_by_hand(case, batches, [0.005, 0.01]))
    start, end = initial(case), by_hand[-1][2]
    moved = {name: end[name] - start[name] for name in start}
    for schedule in ("1f1b", "dualpipev"):
        for results in (outcome[schedule].results for outcome in outcomes):
            for result, (loss, norm, _) in zip(results, by_hand, strict=True):
                assert norm > 0.5, "this test is about clipping"
                assert result.updated
                assert result.grad_norm == pytest.approx(norm, rel=1e-9), "before clipping"
                assert result.loss == pytest.approx(loss, rel=1e-9)
        weights = joined([outcome[schedule].weights for outcome in outcomes])
        found = {name: weights[name] - start[name] for name in start}
        assert_near(found, moved, tolerance=1e-6, label=f"pp {pp} {schedule}")


# Means over what counts


def masked(share: float) -> Batch:
    """Eight sequences of 16, this share of their labels masked; 0.99 leaves one that counts."""
    draw = np.random.default_rng(3)
    tokens_NS, labels_NS = (draw.integers(0, 260, (8, 16)) for _ in range(2))
    places = draw.permutation(labels_NS.size)[: round(share * labels_NS.size)]
    labels_NS.reshape(-1)[places] = NOT_COUNTED
    return Batch(tokens_NS, labels_NS, np.arange(8))


def slice_masked() -> Batch:
    """The middle sequences do not count at all: whole micro-batches of every cut but one."""
    batch = masked(0.3)
    labels_NS = batch.labels_NS.copy()
    labels_NS[4:] = NOT_COUNTED
    return replace(batch, labels_NS=labels_NS)


MASKS = {f"{share:.0%}": masked(share) for share in (0.01, 0.3, 0.99, 1.0)}
MASKS["a slice"] = slice_masked()


def cut(pp: int, size: int, scope: str) -> Recipe:
    training = {"global_batch_size": 8, "micro_batch_size": size, "sequence_length": 16}
    return small(pp, num_layers=3, training=training, balance={"scope": scope})


def every_cut(pp: int, scope: str) -> dict[tuple[str, int], Outcome]:
    return {
        (mask, size): steps(cut(pp, size, scope), [batch])
        for mask, batch in MASKS.items()
        for size in (8, 4, 1)
    }


@pytest.mark.parametrize(("pp", "scope"), [(1, "none"), (1, "sequence"), (2, "sequence")])
def test_loss_and_gradient_are_means_over_the_batch_however_it_is_cut(run_ranks, pp, scope):
    outcomes = run_ranks(pp, every_cut, pp, scope)
    wholes = {
        mask: whole_batch(cut(pp, 8, scope), initial(cut(pp, 8, scope)), batch)
        for mask, batch in MASKS.items()
    }
    for mask, size in outcomes[0]:
        label, whole = f"{mask} masked, micro-batch {size}", wholes[mask]
        result = outcomes[-1][mask, size].result
        assert result.num_counted == (MASKS[mask].labels_NS != NOT_COUNTED).sum(), label
        assert result.updated, label
        assert result.loss == pytest.approx(whole.loss, rel=1e-6, abs=0), label
        assert result.balance_loss == pytest.approx(whole.balance, rel=1e-6), label
        grads = joined([outcome[mask, size].grads for outcome in outcomes])
        assert_near(grads, whole.grads, tolerance=1e-6, label=label)


def test_a_batch_in_which_nothing_counts_has_loss_and_gradient_zero_and_only_decays(run_ranks):
    case = small(1)
    [outcome] = run_ranks(1, steps, case, [nothing_counts()])
    start, result = initial(case), outcome.result
    assert (result.num_counted, result.loss, result.grad_norm) == (0, 0.0, 0.0)
    assert result.updated
    for name, weight in joined([outcome.weights]).items():
        decay = 0.1 if weight.ndim > 1 else 0.0
        torch.testing.assert_close(weight, start[name] * (1 - 0.01 * decay), rtol=1e-14, atol=0)


# Nothing moves on what is not finite


def plant(trainer: Trainer, rank: int, place: str, value: float) -> Any:
    """Put `value` into a weight of `rank` now, or into a gradient or the loss of the next step."""
    world, model = trainer.world, trainer.model
    if world.rank != rank:
        return lambda text: None
    stage = next(iter(model.stages.values()))
    masters = model.parameters.masters
    name = next(name for name in masters if name.endswith("input_layernorm.weight"))
    last = slot_text(model.table.rows[model.mesh.coordinates(rank).pp][-1])

    def ruined(like: Tensor) -> Tensor:
        zeros = torch.zeros_like(like)
        zeros.view(-1)[5] = value
        return zeros

    def watch(text: str) -> None:
        if place == "gradient" and text == last:
            sink = next(iter(stage.layers.values())).parts.sink
            weight = stage.get_parameter(name)
            sink.add(weight, ruined(weight))
        if place == "loss" and text == "optimizer":
            del stage.loss  # the sound one comes to light again

    if place == "weight":
        masters[name].add_(ruined(masters[name]))
    if place == "loss":
        sound = stage.loss
        stage.loss = lambda carry, labels_BS: sound(carry, labels_BS) + value
    return watch


FAULTS = [
    (0, "weight", math.nan),
    (1, "weight", math.nan),
    (0, "gradient", math.nan),
    (1, "gradient", math.nan),
    (0, "gradient", math.inf),
    (1, "gradient", -math.inf),
    (1, "loss", math.inf),  # with gradients that are finite on every rank
]


def step_over_faults() -> dict[Any, dict[str, Any]]:
    reference = new_trainer(small(2))
    for index in (0, 2):
        reference.step(index, random_batch(6, seed=index))
    found = {}
    for fault in FAULTS:
        trainer = new_trainer(small(2))
        trainer.step(0, random_batch(6, seed=0))
        sound = state(trainer)
        watch = plant(trainer, *fault)
        before = state(trainer)
        result = trainer.step(1, random_batch(6, seed=1), watch=watch)
        kept = same_bits(before, state(trainer))
        for tensor, old in zip(trainer.model.parameters.masters.values(), sound[::4], strict=True):
            tensor.copy_(old)
        after = trainer.step(2, random_batch(6, seed=2))
        found[fault] = {
            "updated": result.updated,
            "faulty": result.faulty_ranks,
            "finite": math.isfinite(result.loss) and math.isfinite(result.grad_norm),
            "kept": kept,
            "recovered": after.updated and same_bits(state(trainer), state(reference)),
        }
    return found


def test_a_weight_gradient_or_loss_that_is_not_finite_on_one_rank_moves_no_rank(run_ranks):
    for found in run_ranks(2, step_over_faults):
        for (rank, place, value), seen in found.items():
            label = f"{place} {value} on rank {rank}"
            assert seen["updated"] is False, label
            assert seen["finite"] is False, label
            assert seen["kept"] is True, f"{label}: weights, moments or counts moved"
            assert seen["recovered"] is True, f"{label}: the step left something behind"
            # A weight that is not finite spreads forward and backward through the pipeline.
            assert seen["faulty"] == ((0, 1) if place == "weight" else (rank,)), label


SHARED = [{"dp": 2}, {"dp": 2, "dp_shard": 1}, {"ep": 2}]


def faults_of_data_ranks() -> list[tuple[str, tuple[int, ...]]]:
    """Who is named where rank 1 alone meets a fault, before gradients are summed over ranks."""
    named = []
    for layout in SHARED:
        for place, value in (("gradient", math.inf), ("loss", math.nan)):
            case = recipe(pp=1, schedule="1f1b", micro_batches=2, **layout)
            with trainer_of(case) as trainer:
                watch = plant(trainer, 1, place, value)
                batch = random_batch(8).take(trainer.rows)
                result = trainer.step(0, batch, watch=watch)
            assert not result.updated
            named.append((f"{layout}, {place}", result.faulty_ranks))
    return named


def test_a_fault_is_laid_to_the_rank_that_met_it_not_to_those_that_share_its_gradients(run_ranks):
    for named in run_ranks(2, faults_of_data_ranks):
        assert dict(named) == {label: (1,) for label, _ in named}


def bad_batches(trainer: Trainer, bad: set[int]) -> Iterator[Batch]:
    """Batches; while a `bad` step runs, a weight of the last rank is NaN."""
    for index in range(trainer.recipe.training.steps):
        good = masters(trainer)
        if index in bad:
            plant(trainer, trainer.world.size - 1, "weight", math.nan)
        yield nothing_counts() if index == 0 else random_batch(6, seed=index)
        if index in bad:
            for name, master in trainer.model.parameters.masters.items():
                master.copy_(good[name])


POLICIES = {
    "stop": ({2}, {"non_finite": "stop"}),
    "skip all of it": ({1, 2, 4, 5}, {"non_finite": "skip", "max_skips": 2}),
    "too many in a row": ({1, 3, 4, 5}, {"non_finite": "skip", "max_skips": 2}),
}


def run_loops(folder: Path) -> dict[str, tuple[int, str]]:
    """Steps written down and the error, by policy."""
    found = {}
    for name, (bad, policy) in POLICIES.items():
        case = small(2, training={"steps": 7, **policy})
        trainer, run_dir = new_trainer(case), folder / name
        run_dir.mkdir(exist_ok=True)
        job = Job(case.to_toml(), "test", str(run_dir), run_id="a test")
        data = SimpleNamespace(
            sample_ids=lambda first: np.arange(first, first + 6), fingerprint="", tokenizer=""
        )
        saver = SimpleNamespace(save=lambda manifest: (), check=lambda: (), wait=lambda: ())
        error = ""
        with loop.Log(run_dir / "metrics.jsonl", case, trainer.world) as log:
            here, stop = loop._Whereabouts(job, trainer), StopRequest()
            rank = loop._Rank(job, trainer, data, log, Shelf(run_dir), saver, here, stop, START)
            try:
                rank.train(bad_batches(trainer, bad))
            except RunFailedError as failure:
                error = f"{failure.code}: {failure}"
        found[name] = len(log.speeds), error
    return found


def test_the_loop_stops_at_once_or_passes_over_so_many_bad_steps_in_a_row(run_ranks, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    first, second = run_ranks(2, run_loops, folder)
    assert first == second, "all ranks end alike"
    assert first["skip all of it"] == (7, "")
    for name, num_steps, in_a_row in (("stop", 3, 1), ("too many in a row", 6, 3)):
        steps, error = first[name]
        assert steps == num_steps, name
        assert error.startswith(f"run.non-finite: step {num_steps}: loss nan")
        assert "on rank 0, 1" in error
        assert f"found {in_a_row} such steps in a row" in error
    for name, (bad, _) in POLICIES.items():
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        events = [(line["event"], line["step"]) for line in lines if "event" in line]
        reported = [step + 1 for step in sorted(bad) if step < first[name][0]]
        wanted = [("nothing_counted", 1), *(("non_finite", step) for step in reported)]
        wanted += [("checkpoint", 7)] if name == "skip all of it" else []
        assert events == wanted, name


# Loads, times and evaluation


def seconds_in_gather() -> float:
    trainer = new_trainer(small(1))
    with trainer.model.stopwatch.running("gather"):
        time.sleep(0.5)  # as an evaluation would, between two steps
    return trainer.step(0, random_batch(6)).communication_seconds["gather"]


def test_the_times_of_a_step_leave_out_what_went_before_it(run_ranks):
    [seconds] = run_ranks(1, seconds_in_gather)
    assert 0 < seconds < 0.4


def steps_and_evaluation(pp: int) -> dict[str, Any]:
    plain, mixed = new_trainer(small(pp)), new_trainer(small(pp))
    results = [plain.step(index, random_batch(6, seed=index)) for index in range(2)]
    again = [mixed.step(0, random_batch(6, seed=0))]
    weights, before = weights_of(mixed), state(mixed)
    total = mixed.evaluate(random_batch(6, seed=9))
    mixed.model.parameters.gather()
    sink = next(iter(next(iter(mixed.model.stages.values())).layers.values())).parts.sink
    left = [
        sink.main_grad(parameter)
        for stage in mixed.model.stages.values()
        for _, parameter in stage.named_parameters()
    ]
    mixed.model.parameters.release()
    found = {
        "total": total,
        "twice": mixed.evaluate(random_batch(6, seed=9)),
        "kept": same_bits(before, state(mixed)),
        "gradients": max(float(grad.abs().max()) for grad in left),
        "weights": weights,
    }
    again.append(mixed.step(1, random_batch(6, seed=1)))
    return found | {
        "results": results,
        "loads": [result.load_LE for result in again],
        "same": same_bits(state(plain), state(mixed)),
    }


@pytest.fixture(params=[1, 2])
def evaluated(request, run_ranks) -> list[dict[str, Any]]:
    return run_ranks(request.param, steps_and_evaluation, request.param)


def test_evaluation_gives_the_sum_of_the_losses_and_changes_nothing(evaluated):
    batch, weights = random_batch(6, seed=9), joined([found["weights"] for found in evaluated])
    num_counted = int((batch.labels_NS != NOT_COUNTED).sum())
    wanted = whole_batch(small(1), weights, batch).loss * num_counted
    for found in evaluated:
        assert found["total"] == pytest.approx(wanted, rel=1e-9)
        assert found["twice"] == found["total"]
        assert found["kept"] is True, "weights, moments or counts moved"
        assert found["gradients"] == 0.0, "evaluation left gradients behind"
        assert found["same"] is True, "the step after it is another one"


def test_loads_count_every_token_and_slot_exactly_also_after_evaluation(evaluated):
    case = small(1)
    weights = joined([found["weights"] for found in evaluated])
    wanted = [
        whole_batch(case, before, random_batch(6, seed=index)).load_LE
        for index, before in enumerate((initial(case), weights))
    ]
    assert all(sum(row) == TOKENS * case.architecture.top_k for row in wanted[0][2:])
    assert sum(wanted[0][1]) == 0, "the layer without experts"
    for found in evaluated:
        plain = [result.load_LE for result in found["results"]]
        assert plain == found["loads"]
        assert [[list(row) for row in load_LE] for load_LE in plain] == wanted


# bfloat16


def test_bfloat16_computes_on_copies_of_float32_masters_and_stays_near_float32(run_ranks):
    run_ranks(1, four_steps_in_bfloat16)


def four_steps_in_bfloat16() -> None:
    model = {"fields": small(1).model.fields | {"initializer_range": 0.02}}
    wide, narrow = (
        new_trainer(small(1, precision=precision, model=model, optimizer={"lr": 1e-3}))
        for precision in ("float32", "bfloat16")
    )
    for index in range(4):
        batch = random_batch(6, seed=index)
        wanted, found = wide.step(index, batch), narrow.step(index, batch)
        assert found.loss == pytest.approx(wanted.loss, abs=5e-3)
        assert found.loss != wanted.loss
    narrow.model.parameters.gather()
    [stage] = narrow.model.stages.values()
    sink = stage.layers["0"].parts.sink
    kept = {tensor.dtype for tensor in state(narrow)}
    assert kept == {torch.float32}, "masters, moments and counts"
    for name, copy in stage.named_parameters():
        master = narrow.model.parameters.masters[name]
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy.detach(), master.bfloat16()), f"{name} is out of date"
        assert not torch.equal(copy.detach().float(), master), f"{name} lost its master"
        assert sink.main_grad(copy).dtype == torch.float32


def test_the_gradient_norm_is_right_for_tensors_of_many_elements() -> None:
    grad = torch.randn(30_000_000, generator=torch.Generator().manual_seed(0))
    exact = sum(float(piece.double().square().sum()) for piece in grad.split(1 << 20))

    assert sum_of_squares([grad[:7], grad[7:]]) == pytest.approx(exact, rel=1e-6)
    assert float(grad.norm()) ** 2 != pytest.approx(exact, rel=1e-6), "the plain norm would do"
