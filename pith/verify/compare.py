"""Two runs of one recipe, step by step: whether they are the same run, by the one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pith.report import Check
from pith.verify.record import Run


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and what came of it."""

    a: Run
    b: Run
    checks: tuple[Check, ...]
    first_difference: Mapping[str, Any] | None

    @property
    def data(self) -> dict[str, Any]:
        """For the report: first_difference, max_relative, steps_compared, ratios and more."""
        return {}


def compare(a: Run, b: Run, *, reordered: bool = False, weights: bool = True) -> Comparison:
    """Hold run `b` against the baseline `a`; bad data is a failed check, never an exception.

    `reordered` says that a change alters the order of sums; without `weights` the final tensors
    are left out.
    """
    raise NotImplementedError(a, b, reordered, weights)
