"""Layout parity: the same steps on every layout of ranks as in one process.

A layout is structure: which rank holds what, what moves between ranks, what is summed where and in
which order things run. So everything is computed in float64 with the operators that serve it, where
a difference of structure stands out from rounding by many orders of magnitude; how kernels compute
in lower precision is compared elsewhere. What a layout finds goes through the production trainer
on real processes; what it should find is `pith.verify.one_piece`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from time import monotonic
from typing import Any

from torch import Tensor

from pith.config import Recipe
from pith.data.loader import Batch
from pith.errors import PithError, RequestError, RunFailedError, StoppedError, UnavailableError
from pith.launch.devices import DeviceChoice
from pith.report import Check
from pith.verify.first_difference import (
    came_from,
    first_backward,
    first_forward,
    loss_difference,
)
from pith.verify.layout import Layout, default_layouts, parse_layouts, runnable
from pith.verify.layout_run import RankSteps, run_layout
from pith.verify.one_piece import (
    Descent,
    Weights,
    Whole,
    clipped,
    initial,
    random_batch,
    whole_batch,
)
from pith.verify.probe import Probe
from pith.verify.share import Share, gaps, joined

__all__ = ["Layout", "Parity", "check_layouts", "default_layouts", "parse_layouts"]

NUM_STEPS = 2
# The first step starts from the same bits. The second one starts from weights that AdamW has made
# of gradients, which lends small ones, and so their rounding, the size of large ones.
TOLERANCES = (1e-10, 1e-8)
WEIGHT_TOLERANCES = (1e-9, 1e-8)  # of how far a weight has moved
BITES = 0.5  # of the norm of the first step, so that clipping does something
# What forward and backward find, before the optimizer.
PASSES = frozenset(
    {
        *("counted labels", "loss", "balance loss", "z loss", "expert load", "gradient norm"),
        "gradients",
    }
)


@dataclass(frozen=True, slots=True)
class Parity:
    """What was checked, and figures of each layout."""

    checks: tuple[Check, ...]
    data: dict[str, Any]


def check_layouts(
    recipe: Recipe,
    layouts: Sequence[Layout],
    *,
    device: DeviceChoice,
    say: Callable[[str], None],
) -> Parity:
    """Two steps of `recipe` on each of `layouts`, compared with the same in one process.

    Global batch (random tokens, unevenly masked labels), weights and seed are the same for all.
    Of the recipe everything counts but precision, operators, the course of the learning rate and
    the sizes of the batch. `say` gets a line for each layout. Raises RequestError with all faults
    of all layouts before any process starts, UnavailableError where `device` does not serve.
    """
    assert layouts, "nothing to check"
    recipes = runnable(_structure(recipe), layouts)
    reference = _Reference(recipes[0], recipes[0].training.global_batch_size)
    checks: list[Check] = []
    figures: dict[str, dict[str, Any]] = {}
    for layout, own in zip(layouts, recipes, strict=True):
        start = monotonic()
        case = _Case(layout, reference.clipping(own), reference)
        found = case.check(device)
        checks += found.checks
        figures[str(layout)] = found.figures | {"seconds": round(monotonic() - start, 3)}
        first = found.figures["first_difference"]
        say(f"{layout}: {'equal' if first is None else first}")
    return Parity(tuple(checks), _summary(figures))


def _structure(recipe: Recipe) -> Recipe:
    """What of `recipe` a layout can change, in float64, with a rate that differs from step to
    step."""
    raw = recipe.model_dump(mode="json")
    raw["operators"] = {}
    raw["training"] |= {"precision": "float64", "steps": NUM_STEPS}
    raw["optimizer"] |= {
        "schedule": "constant",
        "warmup_steps": NUM_STEPS,
        "decay_steps": 0,
        "decay_shape": "linear",
        "min_lr_ratio": 0.0,
    }
    # Axes and batch are the layout's to give: as for one rank until then.
    raw["parallel"] |= {"pp": 1, "ep": 1, "cp": 1, "dp_shard": None, "num_stages": None}
    raw["parallel"] |= {"layers_per_stage": None}
    raw["training"] |= {"global_batch_size": recipe.training.micro_batch_size}
    return Recipe.model_validate(raw)


def _summary(figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of each layout, and over all of them."""
    differing = [f for f in figures.values() if f["first_difference"] is not None]

    def worst(name: str) -> float:
        return max(float(f["max_relative"].get(name, inf)) for f in figures.values())

    return {
        "layouts": dict(figures),
        "first_difference": differing[0]["first_difference"] if differing else None,
        "max_relative": {name: worst(name) for name in ("loss", "grad_norm")},
        "steps_compared": min(f["steps"] for f in figures.values()),
    }


@dataclass(frozen=True, slots=True)
class _PlainStep:
    """A step of one process."""

    batch: Batch
    whole: Whole
    lr: float
    given: Weights  # gradients after clipping
    weights: Weights  # after the step


class _Reference:
    """The steps of one process, computed once for each way in which the batch is cut."""

    def __init__(self, recipe: Recipe, num_sequences: int) -> None:
        arch, training = recipe.architecture, recipe.training
        self.batches = tuple(
            random_batch(
                num_sequences,
                length=training.sequence_length,
                vocab_size=arch.vocab_size,
                seed=training.seed + step,
            )
            for step in range(NUM_STEPS)
        )
        self.start = initial(recipe)
        self._known: dict[tuple[int, ...], list[_PlainStep]] = {}
        first = whole_batch(recipe, self.start, self.batches[0])
        self._clip = BITES * first.norm

    def clipping(self, recipe: Recipe) -> Recipe:
        """`recipe` with a clip below the norm, unless it has none or a lower one."""
        clip = recipe.training.clip
        if clip is None or clip <= self._clip:
            return recipe
        training = recipe.training.model_copy(update={"clip": self._clip})
        return recipe.model_copy(update={"training": training})

    def steps(self, recipe: Recipe, world_size: int) -> list[_PlainStep]:
        """What the steps of `recipe` find; only some router losses depend on the cut."""
        plan = recipe.batch(world_size)
        depends = recipe.balance.scope in ("micro-batch", "global-batch")
        key = (plan.data_ranks, plan.micro_batch_size) if depends else ()
        if key not in self._known:
            self._known[key] = list(self._take(recipe, world_size))
        return self._known[key]

    def _take(self, recipe: Recipe, world_size: int) -> Iterator[_PlainStep]:
        descent, weights = Descent(recipe, self.start), self.start
        for step, batch in enumerate(self.batches):
            whole = whole_batch(recipe, weights, batch, world_size=world_size)
            given = clipped(whole.grads, recipe.training.clip)
            lr = recipe.optimizer.lr * (step + 1) / NUM_STEPS
            weights = descent.step(given, lr=lr)
            yield _PlainStep(batch, whole, lr, given, weights)

    def probed(self, recipe: Recipe, world_size: int, *, step: int) -> Probe:
        """What passes between the stages of layers in a step."""
        weights = self.steps(recipe, world_size)[step - 1].weights if step else self.start
        batch = self.batches[step]
        probe = Probe(range(len(batch.tokens_NS)))
        whole_batch(recipe, weights, batch, world_size=world_size, probe=probe)
        return probe


@dataclass(frozen=True, slots=True)
class _Finding:
    """One quantity of one step. `error` is relative, or infinite where none can be told."""

    quantity: str
    step: int
    error: float
    tolerance: float  # 0: equal
    text: str  # what differs

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(slots=True)
class _Found:
    """What came of one layout."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Case:
    """One layout against one process."""

    layout: Layout
    recipe: Recipe
    reference: _Reference

    def check(self, device: DeviceChoice) -> _Found:
        """Run it, compare, and look for the place where something differs."""
        try:
            ranks = self._run(device)
        except (RequestError, UnavailableError, StoppedError):
            raise
        except PithError as error:
            if error.code == "run.stopped":
                raise
            return self._failed(error)
        findings = list(self._findings(ranks))
        checks = [Check(self._name("ran"), True, f"{NUM_STEPS} steps on {len(ranks)} ranks")]
        quantities = dict.fromkeys(finding.quantity for finding in findings)
        for quantity in quantities:
            checks.append(self._check([f for f in findings if f.quantity == quantity]))
        failed = next((finding for finding in findings if not finding.ok), None)
        first = None if failed is None else self._first_difference(failed, device)
        if first is not None:
            checks.append(Check(self._name("first difference"), False, first, "none"))
        return _Found(checks, self._figures(ranks, findings, first))

    def _run(self, device: DeviceChoice, *, probed: int | None = None) -> list[RankSteps]:
        size = self.layout.world_size
        batches = self.reference.batches
        return run_layout(self.recipe, batches, num_ranks=size, device=device, probed=probed)

    def _steps(self) -> list[_PlainStep]:
        return self.reference.steps(self.recipe, self.layout.world_size)

    def _name(self, quantity: str) -> str:
        return f"{self.layout}: {quantity}"

    def _failed(self, error: PithError) -> _Found:
        text = "; ".join((str(error), *getattr(error, "__notes__", [])[-1:]))
        last = text.strip().splitlines()
        found = last[0] if len(last) == 1 else f"{last[0]} ... {last[-1].strip()}"
        check = Check(self._name("ran"), False, found, f"{NUM_STEPS} steps")
        figures = {"steps": 0, "max_relative": {}, "first_difference": f"did not run: {found}"}
        return _Found([check], figures)

    def _check(self, findings: Sequence[_Finding]) -> Check:
        """The check of one quantity over all steps: the first that fails, or the worst."""
        failed = [finding for finding in findings if not finding.ok]
        shown = failed[0] if failed else max(findings, key=lambda finding: finding.error)
        wanted = f"relative {shown.tolerance:g} or less" if shown.tolerance else "equal"
        found = shown.text if failed else f"relative {shown.error:.1e}" if shown.error else "equal"
        where = f"step {shown.step + 1}" if failed else ""
        return Check(self._name(shown.quantity), not failed, found, wanted, where)

    def _findings(self, ranks: Sequence[RankSteps]) -> Iterator[_Finding]:
        """Every quantity of every step, in the order in which a step comes to it."""
        before = self.reference.start
        for index, step in enumerate(self._steps()):
            yield from self._of_passes(index, step, ranks)
            yield from self._of_optimizer(index, step, ranks, before=before)
            before = step.weights

    def _of_passes(
        self, index: int, step: _PlainStep, ranks: Sequence[RankSteps]
    ) -> Iterator[_Finding]:
        result, whole = ranks[0].results[index], step.whole
        counted = step.batch.num_counted
        agreed = [_agreed(rank, index) for rank in ranks]
        odd = [str(rank) for rank, values in enumerate(agreed) if values != agreed[0]]
        yield _exact("ranks agree", index, not odd, f"ranks {', '.join(odd)} differ from rank 0")
        table = self.recipe.table(self.layout.world_size).row_texts()
        mesh = self.recipe.mesh(self.layout.world_size)
        for rank, found in enumerate(ranks):
            row = table[mesh.coordinates(rank).pp]
            ran = " ".join(found.results[index].slots)
            yield _exact("executed order", index, ran == row, f"rank {rank}: {ran}")
        same = result.num_counted == counted
        yield _exact("counted labels", index, same, f"{result.num_counted} instead of {counted}")
        for quantity, value, wanted in (
            ("loss", result.loss, whole.loss),
            ("balance loss", result.balance_loss, whole.balance),
            ("z loss", result.z_loss, whole.z),
        ):
            yield _near(quantity, index, value, wanted)
        load_LE = [list(row) for row in result.load_LE]
        layers = [n for n, row in enumerate(whole.load_LE) if load_LE[n : n + 1] != [row]]
        yield _exact("expert load", index, load_LE == whole.load_LE, f"layers {layers} differ")
        grads = [rank.grads[index] for rank in ranks]
        yield from self._tensors("gradients", index, grads, whole.grads)
        yield _near("gradient norm", index, result.grad_norm, whole.norm)

    def _of_optimizer(
        self, index: int, step: _PlainStep, ranks: Sequence[RankSteps], *, before: Weights
    ) -> Iterator[_Finding]:
        if not all(rank.results[index].updated for rank in ranks):
            yield _exact("updated", index, False, "no step was taken: something is not finite")
            return
        given = [rank.given[index] for rank in ranks]
        yield from self._tensors("clipped gradients", index, given, step.given)
        rates = {rank.rates[index] for rank in ranks} | {ranks[0].results[index].lr}
        yield _exact("learning rate", index, rates == {step.lr}, f"{rates}, not {step.lr!r}")
        weights = [rank.weights[index] for rank in ranks]
        yield from self._tensors("weights", index, weights, step.weights, before=before)

    def _tensors(
        self,
        quantity: str,
        index: int,
        shares: Sequence[Share],
        wanted: Mapping[str, Tensor],
        *,
        before: Mapping[str, Tensor] | None = None,
    ) -> Iterator[_Finding]:
        """Each tensor relative in norm; of weights how far they have moved since `before`."""
        tolerance = (TOLERANCES if before is None else WEIGHT_TOLERANCES)[index]
        try:
            found = joined(shares)
        except RunFailedError as error:
            yield _Finding(quantity, index, inf, tolerance, str(error))
            return
        if before is not None:
            found = {name: tensor - before[name] for name, tensor in found.items()}
            wanted = {name: tensor - before[name] for name, tensor in wanted.items()}
        all_gaps = gaps(found, wanted)
        worst = max(all_gaps, key=lambda each: each.relative)
        wrong = [each for each in all_gaps if not each.relative <= tolerance]
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        text = wrong[0].text(self._sizes()) + more if wrong else worst.name
        yield _Finding(quantity, index, worst.relative, tolerance, text)

    def _sizes(self) -> dict[str, int]:
        """What a factor may come from."""
        layout = self.layout
        micro = self.recipe.batch(layout.world_size).num_micro_batches
        data = {"dp * ep": layout.dp * layout.ep} if layout.dp > 1 < layout.ep else {}
        return {"ep": layout.ep, "dp": layout.dp, "pp": layout.pp, "micro-batches": micro} | data

    def _first_difference(self, failed: _Finding, device: DeviceChoice) -> str:
        """The place where the layout first differs, by a second run of that step with probes."""
        told = f"{failed.quantity}: {failed.text}"
        if failed.quantity not in PASSES:
            return f"step {failed.step + 1}, {told}"
        size = self.layout.world_size
        one = self.reference.probed(self.recipe, size, step=failed.step)
        ranks = [rank.probe for rank in self._run(device, probed=failed.step)]
        probes = [probe for probe in ranks if probe is not None]
        tolerance, step = TOLERANCES[failed.step], f"step {failed.step + 1}"
        forward = first_forward(one, probes, tolerance=tolerance)
        if forward is not None:
            return f"{step}, forward: {forward.text()}"
        losses_N = self._steps()[failed.step].whole.losses_N
        loss = loss_difference(losses_N, probes, tolerance=tolerance)
        if loss is not None:
            return f"{step}, forward: {loss}"
        backward = first_backward(one, probes, tolerance=tolerance)
        if backward is not None:
            place, by = backward.text(), came_from(backward.place)
            return f"{step}, forward equal; backward ({by}): gradient of {place}; then {told}"
        return f"{step}, activations and their gradients equal; {told}"

    def _figures(
        self, ranks: Sequence[RankSteps], findings: Sequence[_Finding], first: str | None
    ) -> dict[str, Any]:
        def worst(quantity: str) -> float:
            return max(f.error for f in findings if f.quantity == quantity)

        grads = max((f for f in findings if f.quantity == "gradients"), key=lambda f: f.error)
        return {
            "steps": NUM_STEPS,
            "ranks": len(ranks),
            "schedule": self.recipe.table(len(ranks)).name,
            "loss": [result.loss for result in ranks[0].results],
            "worst_tensor": grads.text,
            "worst_relative": grads.error,
            "max_relative": {"loss": worst("loss"), "grad_norm": worst("gradient norm")},
            "first_difference": first,
        }


def _agreed(rank: RankSteps, index: int) -> str:
    """What every rank says of a step, as text: one NaN is as good as another."""
    r = rank.results[index]
    return repr((r.loss, r.balance_loss, r.z_loss, r.grad_norm, r.lr, r.num_counted, r.load_LE))


def _exact(quantity: str, step: int, same: bool, text: str) -> _Finding:
    return _Finding(quantity, step, 0.0 if same else inf, 0.0, text)


def _near(quantity: str, step: int, found: float | None, wanted: float | None) -> _Finding:
    if found is None or wanted is None or not isfinite(found):
        return _exact(quantity, step, found is wanted is None, f"{found} instead of {wanted}")
    error = abs(found - wanted)
    relative = 0.0 if error == 0 else error / abs(wanted) if wanted else inf
    factor = f", {found / wanted:.6g} times that" if wanted else ""
    text = f"{found!r} instead of {wanted!r}{factor}"
    return _Finding(quantity, step, relative, TOLERANCES[step], text)
