"""Two runs of one recipe, step by step: whether they are the same run, by the one table."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pith.config.changes import ABSENT, changes
from pith.report import Check
from pith.verify.difference import (
    EXACT,
    QUANTITIES,
    VALIDATION,
    Difference,
    limit,
    relative,
    step_differences,
    validation_differences,
)
from pith.verify.order import differing_order
from pith.verify.record import Run
from pith.verify.steps import finite_number
from pith.verify.tolerance import MEAN_STEPS, Tolerance, tolerance_for
from pith.verify.weights import Weights, compare_weights


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and what came of it. `a` is the baseline."""

    a: Run
    b: Run
    tolerance: Tolerance
    why: tuple[str, ...]  # why it is this row of the table
    differences: tuple[Difference, ...]  # every quantity of every step, equal ones with 0
    weights: Weights | None  # None: left out
    checks: tuple[Check, ...]

    @property
    def first_difference(self) -> Difference | None:
        """The earliest one beyond the tolerance, in its step the first in causal order."""
        return next((d for d in self.differences if d.is_beyond(self.tolerance)), None)

    @property
    def first_unequal(self) -> Difference | None:
        """The earliest one of other bits, whether or not the tolerance allows it."""
        return next((d for d in self.differences if d.relative > 0), None)

    @property
    def steps_compared(self) -> int:
        """Steps that both runs have."""
        return len(self.a.by_step.keys() & self.b.by_step.keys())

    @property
    def speed_ratio(self) -> float | None:
        """Median tokens per second of B by those of A; None where either is not known."""
        return _ratio(_median_speed(self.b), _median_speed(self.a))

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of B by that of A; None where either is not known."""
        return _ratio(_peak_memory(self.b), _peak_memory(self.a))

    def of(self, quantity: str) -> list[Difference]:
        """The differences of one quantity, step by step."""
        return [d for d in self.differences if d.quantity == quantity]

    def max_relative(self, quantity: str) -> float | None:
        """The largest one of a quantity; infinite where a value is none, None without a step."""
        return max((d.relative for d in self.of(quantity)), default=None)

    @property
    def data(self) -> dict[str, Any]:
        """For the report."""
        first, unequal = self.first_difference, self.first_unequal
        return {
            "runs": {"a": str(self.a.path), "b": str(self.b.path)},
            "first_difference": first.data if first else None,
            "first_unequal": unequal.data if unequal else None,
            "max_relative": {q: self.max_relative(q) for q in QUANTITIES if q not in EXACT},
            "steps_compared": self.steps_compared,
            "speed_ratio": self.speed_ratio,
            "memory_ratio": self.memory_ratio,
            "tolerance": self.tolerance.name,
            "why": list(self.why),
            "weights": self.weights.data if self.weights else None,
            "recipe_differences": recipe_differences(self.a, self.b),
        }


def compare(a: Run, b: Run, *, reordered: bool = False, weights: bool = True) -> Comparison:
    """Hold run `b` against the baseline `a`; bad data is a failed check, never an exception.

    `reordered` says that a change alters the order of sums; without `weights` the final tensors
    are left out.
    """
    tolerance, why = _choose(a, b, reordered=reordered)
    differences = tuple(step_differences(a, b))
    compared = compare_weights(a, b, tolerance) if weights else None
    checks = (
        *a.checks(),
        *b.checks(),
        _length_check(a, b),
        _corpus_check(a, b),
        *(
            _quantity_check(q, [d for d in differences if d.quantity == q], tolerance)
            for q in QUANTITIES
        ),
        *([_mean_loss_check(differences, tolerance)] if tolerance.mean_loss else []),
        *_validation_checks(a, b, tolerance),
        *(compared.checks if compared else ()),
    )
    return Comparison(a, b, tolerance, why, differences, compared, checks)


def cost_checks(
    comparison: Comparison, *, min_speed: float | None, max_memory: float | None
) -> Iterator[Check]:
    """Whether the ratios keep the bounds that are given; an unknown ratio keeps none."""
    speed, memory = comparison.speed_ratio, comparison.memory_ratio
    if min_speed is not None:
        is_held = speed is not None and speed >= min_speed
        yield Check("speed", is_held, ratio_text(speed), f"at least {min_speed:g} of A's")
    if max_memory is not None:
        is_held = memory is not None and memory <= max_memory
        yield Check("memory", is_held, ratio_text(memory), f"at most {max_memory:g} of A's")


def ratio_text(ratio: float | None) -> str:
    """A ratio in words."""
    return "unknown" if ratio is None else f"{ratio:.3f}"


def recipe_differences(a: Run, b: Run) -> dict[str, list[Any]]:
    """What the two recipes say differently: both values by dotted name, null for none."""
    first, second = (run.recipe.model_dump(mode="json") for run in (a, b))
    return {
        change.name.removesuffix(" (path)"): [
            None if side == ABSENT else side for side in (change.before, change.after)
        ]
        for change in sorted(changes(first, second), key=lambda change: change.name)
    }


def _choose(a: Run, b: Run, *, reordered: bool) -> tuple[Tolerance, tuple[str, ...]]:
    """The row of the table, and why it is that."""
    first, second = a.recipe.training.precision, b.recipe.training.precision
    reasons = differing_order(a, b) + (("--reordered",) if reordered else ())
    tolerance = tolerance_for(first, second, same_order=not reasons)
    precision = first if first == second else f"{first} against {second}"
    return tolerance, (precision, *(reasons or ("one order of sums on a CPU",)))


def _quantity_check(name: str, own: Sequence[Difference], tolerance: Tolerance) -> Check:
    """Whether every step keeps the tolerance; the first that does not, by its number."""
    most = limit(name, tolerance)
    wanted = f"within {most:g}" if most else "equal"
    if math.isinf(most):
        wanted = "as many pairs" if name == "expert_load" else "finite"
    if not own:
        return Check(name, False, "no step that both runs have", wanted)
    if beyond := [d for d in own if d.is_beyond(tolerance)]:
        more = f", and {len(beyond) - 1} more steps" if len(beyond) > 1 else ""
        return Check(name, False, f"{beyond[0]}{more}", wanted, f"step {beyond[0].step}")
    worst = max(own, key=lambda d: d.relative)
    found = f"at most {worst.relative:.1e} (step {worst.step})" if worst.relative else "equal"
    return Check(
        name, True, f"{found} in {len(own)} {'step' if len(own) == 1 else 'steps'}", wanted
    )


def _mean_loss_check(differences: Sequence[Difference], tolerance: Tolerance) -> Check:
    last = [d for d in differences if d.quantity == "loss"][-MEAN_STEPS:]
    first, second = (_mean([getattr(d, side) for d in last]) for side in ("a", "b"))
    wanted = f"within {tolerance.loss:g}, mean of the last {MEAN_STEPS} steps"
    if first is None or second is None:
        return Check("mean_loss", False, "no step, or one without a finite loss", wanted)
    apart = relative(first, second)
    found = f"{first:.6g} against {second:.6g}, {apart:.1e} apart"
    return Check("mean_loss", apart <= tolerance.loss, found, wanted)


def _mean(values: Sequence[object]) -> float | None:
    numbers = [number for value in values if (number := finite_number(value)) is not None]
    is_whole = bool(values) and len(numbers) == len(values)
    return sum(number / len(values) for number in numbers) if is_whole else None


def _length_check(a: Run, b: Run) -> Check:
    told = [f"{len(run.steps)} of {run.num_steps}" for run in (a, b)]
    is_equal = len(a.steps) == len(b.steps) > 0 and a.num_steps == b.num_steps
    return Check("length", is_equal, " against ".join(told), "equally many steps, at least one")


def _validation_checks(a: Run, b: Run, tolerance: Tolerance) -> Iterator[Check]:
    """The held-out losses; no check where neither run has one, by its metrics and its report."""
    if own := list(validation_differences(a, b)):
        yield _quantity_check(VALIDATION, own, tolerance)


def _corpus_check(a: Run, b: Run) -> Check:
    """Whether both read one corpus, by the fingerprints in their last checkpoints."""
    manifests = [run.checkpoint.manifest for run in (a, b)]
    prints = [(m.corpus, m.tokenizer) if m else None for m in manifests]
    told = [f"{p[0][:16]}, tokenizer {p[1][:16]}" if p else "unknown" for p in prints]
    is_equal = prints[0] is not None and prints[0] == prints[1]
    return Check("corpus", is_equal, told[0] if is_equal else " against ".join(told), "one corpus")


def _median_speed(run: Run) -> float | None:
    """Tokens per second, without the first step of each process, which pays for its start."""
    slow = {1, *(step + 1 for step in run.resumed)}
    told = [step.get("tokens_per_second") for n, step in run.by_step.items() if n not in slow]
    speeds = [number for value in told if (number := finite_number(value)) is not None]
    return statistics.median(speeds) if speeds and len(speeds) == len(told) else None


def _peak_memory(run: Run) -> float | None:
    told = [finite_number(step.get("memory_bytes")) for step in run.by_step.values()]
    return max((number for number in told if number is not None), default=None)


def _ratio(value: float | None, by: float | None) -> float | None:
    if value is None or by is None or by <= 0 or value < 0:
        return None
    ratio = value / by
    return ratio if math.isfinite(ratio) else None
