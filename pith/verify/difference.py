"""How far apart two runs are: each quantity of each step, as one relative figure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pith.verify.record import Run
from pith.verify.steps import OF_EXPERTS, expert_load, finite_number
from pith.verify.tolerance import Tolerance

# What a step tells, in causal order.
QUANTITIES = (
    "samples",
    "sample_digest",
    "tokens",
    "lr",
    "loss",
    "z_loss",
    "balance_loss",
    "expert_load",
    "grad_norm",
)
EXACT = ("samples", "sample_digest", "tokens", "lr")  # functions of the step and the recipe alone
VALIDATION = "validation_loss"
STEP = "step"  # the quantity of a step that only one run has


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values of one quantity in one step. `relative` is infinite where no number says it."""

    step: int
    quantity: str
    a: Any
    b: Any
    relative: float

    def __str__(self) -> str:
        apart = f", {self.relative:.1e} apart" if math.isfinite(self.relative) else ""
        return f"step {self.step}: {_short(self.a)} against {_short(self.b)}{apart}"

    @property
    def data(self) -> dict[str, Any]:
        """For the report."""
        names = ("step", "quantity", "a", "b", "relative")
        return {name: getattr(self, name) for name in names}

    def is_beyond(self, tolerance: Tolerance) -> bool:
        """Whether the tolerance forbids it. What no number says is beyond any."""
        return not self.relative <= limit(self.quantity, tolerance) or math.isinf(self.relative)


def limit(quantity: str, tolerance: Tolerance) -> float:
    """How far apart the quantity of a step may be; infinite where the row has no figure for it."""
    match quantity:
        case "loss":
            figure = None if tolerance.mean_loss else tolerance.loss
        case "validation_loss":
            figure = tolerance.loss
        case "z_loss" | "balance_loss":
            figure = tolerance.balance
        case "expert_load":
            figure = tolerance.load
        case "grad_norm":
            figure = tolerance.grad_norm
        case _:
            figure = 0.0
    return math.inf if figure is None else figure


def step_differences(a: Run, b: Run) -> Iterator[Difference]:
    """Every quantity of every step, in order; a step that only one has is a difference itself."""
    first, second = a.by_step, b.by_step
    for number in sorted(first.keys() | second.keys()):
        if number not in first or number not in second:
            known = ["there" if number in steps else "missing" for steps in (first, second)]
            yield Difference(number, STEP, known[0], known[1], math.inf)
            continue
        for quantity in QUANTITIES:
            mine, its = first[number].get(quantity), second[number].get(quantity)
            yield Difference(number, quantity, mine, its, apart(quantity, mine, its))


def validation_differences(a: Run, b: Run) -> Iterator[Difference]:
    """The held-out loss of each step that either run validated after."""
    for number in sorted(a.validations.keys() | b.validations.keys()):
        mine, its = a.validations.get(number), b.validations.get(number)
        yield Difference(number, VALIDATION, mine, its, apart(VALIDATION, mine, its))


def apart(quantity: str, a: object, b: object) -> float:
    """The relative difference of two values as metrics.jsonl tells them; infinite if one is none.

    Null on both sides is equal for what a model without experts does not have.
    """
    if a is None and b is None:
        return 0.0 if quantity in OF_EXPERTS else math.inf
    if quantity == "expert_load":
        return moved_share(expert_load(a), expert_load(b))
    if quantity == "sample_digest":
        return 0.0 if isinstance(a, str) and a == b else math.inf
    first, second = finite_number(a), finite_number(b)
    return math.inf if first is None or second is None else relative(first, second)


def relative(a: float, b: float) -> float:
    """|a - b| by the larger of the two; 0 for equal bits alone."""
    if a.hex() == b.hex():
        return 0.0
    return max(abs(a - b) / (max(abs(a), abs(b)) or 1.0), math.ulp(0.0))


def moved_share(
    a: Mapping[str, Sequence[int]] | None, b: Mapping[str, Sequence[int]] | None
) -> float:
    """Of the layer that differs most, the share of pairs that went to another expert.

    Infinite where layers, experts or the number of pairs differ.
    """
    if a is None or b is None or a.keys() != b.keys():
        return math.inf
    most = 0.0
    for layer, row in a.items():
        other = b[layer]
        if len(row) != len(other) or sum(row) != sum(other):
            return math.inf
        moved = sum(abs(mine - its) for mine, its in zip(row, other, strict=True))
        most = max(most, moved / (2 * max(1, sum(row))))
    return most


def _short(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 48 else text[:45] + "..."
