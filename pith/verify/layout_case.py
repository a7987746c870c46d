"""One layout against one process: every quantity of every step, and where they first differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from torch import Tensor

from pith.config import Recipe
from pith.errors import PithError, RequestError, RunFailedError, StoppedError, UnavailableError
from pith.launch.devices import DeviceChoice
from pith.report import Check
from pith.verify.first_difference import (
    came_from,
    first_backward,
    first_forward,
    loss_difference,
)
from pith.verify.layout import Layout
from pith.verify.layout_run import RankSteps, run_layout
from pith.verify.one_piece import Weights
from pith.verify.plain_steps import NUM_STEPS, PlainStep, PlainSteps
from pith.verify.probe import Probe
from pith.verify.share import Share, gaps, joined

# The first step starts from the same bits. The second one starts from weights that AdamW has made
# of gradients, which lends small ones, and so their rounding, the size of large ones.
TOLERANCES = (1e-10, 1e-8)
WEIGHT_TOLERANCES = (1e-9, 1e-8)  # of how far a weight has moved
# What forward and backward find, before the optimizer.
PASSES = frozenset(
    {
        *("counted labels", "loss", "balance loss", "z loss", "expert load", "gradient norm"),
        "gradients",
    }
)


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
class CaseResult:
    """What came of one layout."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout against one process."""

    layout: Layout
    recipe: Recipe
    reference: PlainSteps

    def check(self, device: DeviceChoice) -> CaseResult:
        """Run it, compare, and look for the place where something differs."""
        ranks = self._run(device)
        if isinstance(ranks, PithError):
            return self._failed(ranks)
        findings = list(self._findings(ranks))
        checks = [Check(self._name("ran"), True, f"{NUM_STEPS} steps on {len(ranks)} ranks")]
        quantities = dict.fromkeys(finding.quantity for finding in findings)
        for quantity in quantities:
            checks.append(self._check([f for f in findings if f.quantity == quantity]))
        failed = next((finding for finding in findings if not finding.ok), None)
        first = None if failed is None else self._first_difference(failed, device)
        if first is not None:
            checks.append(Check(self._name("first difference"), False, first, "none"))
        return CaseResult(checks, self._figures(ranks, findings, first))

    def _run(
        self, device: DeviceChoice, *, probed: int | None = None
    ) -> list[RankSteps] | PithError:
        """What each rank finds, or how the run failed: that is something wrong with the layout."""
        size, batches = self.layout.world_size, self.reference.batches
        try:
            return run_layout(self.recipe, batches, num_ranks=size, device=device, probed=probed)
        except (RequestError, UnavailableError, StoppedError):
            raise
        except PithError as error:
            if error.code == "run.stopped":  # by a signal
                raise
            return error

    def _steps(self) -> list[PlainStep]:
        return self.reference.steps(self.recipe, self.layout.world_size)

    def _name(self, quantity: str) -> str:
        return f"{self.layout}: {quantity}"

    def _failed(self, error: PithError) -> CaseResult:
        found = _shown(error)
        check = Check(self._name("ran"), False, found, f"{NUM_STEPS} steps")
        figures = {"steps": 0, "max_relative": {}, "first_difference": f"did not run: {found}"}
        return CaseResult([check], figures)

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
        self, index: int, step: PlainStep, ranks: Sequence[RankSteps]
    ) -> Iterator[_Finding]:
        result, whole = ranks[0].results[index], step.whole
        counted = step.batch.num_counted
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
        agreed = [_agreed(rank, index) for rank in ranks]
        odd = [str(rank) for rank, values in enumerate(agreed) if values != agreed[0]]
        yield _exact("ranks agree", index, not odd, f"ranks {', '.join(odd)} differ from rank 0")

    def _of_optimizer(
        self, index: int, step: PlainStep, ranks: Sequence[RankSteps], *, before: Weights
    ) -> Iterator[_Finding]:
        given = [found for rank in ranks if (found := rank.given[index]) is not None]
        taken = len(given) == len(ranks)
        yield _exact("updated", index, taken, "no step was taken: something is not finite")
        if not taken:
            return
        grads = [found.grads for found in given]
        yield from self._tensors("clipped gradients", index, grads, step.given)
        rates = {found.lr for found in given} | {ranks[0].results[index].lr}
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
            found, wanted = _moved(found, before), _moved(wanted, before)
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
        ranks = self._run(device, probed=failed.step)
        if isinstance(ranks, PithError):
            return f"step {failed.step + 1}, {told}; a second run with probes: {_shown(ranks)}"
        one = self.reference.probed(self.recipe, self.layout.world_size, step=failed.step)
        probes = [rank.probe for rank in ranks if rank.probe is not None]
        return self._place(failed.step, one, probes, told=told)

    def _place(self, index: int, one: Probe, probes: Sequence[Probe], *, told: str) -> str:
        """Forward in model order, then backward, then what is left: `told`."""
        tolerance, step = TOLERANCES[index], f"step {index + 1}"
        forward = first_forward(one, probes, tolerance=tolerance)
        if forward is not None:
            return f"{step}, forward: {forward.text()}"
        losses_N = self._steps()[index].whole.losses_N
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


def _moved(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each tensor has moved; one of another name or shape is left for `gaps` to tell."""
    return {
        name: tensor - before[name]
        if name in before and before[name].shape == tensor.shape
        else tensor
        for name, tensor in tensors.items()
    }


def _shown(error: PithError) -> str:
    """An error in one line, with the last one of the traceback of its rank."""
    notes = getattr(error, "__notes__", [])
    return "; ".join((str(error), *(note.strip().splitlines()[-1] for note in notes[-1:])))


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
