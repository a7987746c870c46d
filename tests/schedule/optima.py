"""The least makespans of many small problems, two ranks and up to four micro-batches.

    PYTHONPATH=. python tests/schedule/optima.py

searches them all, writes them to data/optima.json and says how far list and auto are from them.
It takes minutes.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path

from pith.schedule.auto import auto
from pith.schedule.costs import Costs
from pith.schedule.list_scheduler import least_live, list_schedule
from pith.schedule.simulate import simulate
from pith.schedule.table import Placement
from tests.schedule.exhaustive import Problem, shortest

FILE = Path(__file__).parent / "data" / "optima.json"
PLACES = {
    "v": Placement("v", 2, 4),
    "loop 2": Placement("loop", 2, 2),
    "loop 4": Placement("loop", 2, 4),
}
KINDS = ("f", "i", "w", "activation", "w_store")
MODELS = {  # KINDS of four stages, each one number or one a stage
    "equal": (1, 1, 1, 1, 1),
    "uneven kinds": (10, 12, 8, 1, 1),
    "short W": (2, 2, 1, 1, 1),
    "heavy head": ((4, 4, 4, 11), (4, 4, 4, 11), (3, 3, 3, 10), 1, 1),
    "skewed": ((5, 6, 4, 13), (6, 7, 5, 12), (4, 5, 4, 12), (3, 2, 2, 1), (2, 1, 1, 1)),
}


@dataclass(frozen=True)
class Case:
    """`comm` in parts of a mean F, `room` in parts of what one micro-batch needs."""

    model: str
    comm: Fraction
    pair: Fraction
    room: Fraction
    num_micro_batches: int

    def kinds(self, num_stages: int) -> dict[str, tuple[int, ...]]:
        """By stage; two stages hold two of the four each."""
        by_stage = [k if isinstance(k, tuple) else (k,) * 4 for k in MODELS[self.model]]
        share = 4 // num_stages
        return {
            kind: tuple(sum(cost[s * share : (s + 1) * share]) for s in range(num_stages))
            for kind, cost in zip(KINDS, by_stage, strict=True)
        }

    @property
    def delay(self) -> Fraction:
        return self.comm * sum(self.kinds(4)["f"]) / 4

    def costs(self, place: Placement) -> Costs:
        kinds, share = self.kinds(place.num_stages), 4 // place.num_stages
        return Costs(**kinds, comm=float(self.delay), layers=share, pair=float(self.pair))

    def bound(self, place: Placement) -> Fraction:
        return self.room * Fraction(least_live(place, self.costs(place)))

    def problem(self, place: Placement) -> Problem:
        num_stages = place.num_stages
        kinds = {k: tuple(map(Fraction, v)) for k, v in self.kinds(num_stages).items()}
        return Problem(
            ranks=tuple(map(place.rank, range(num_stages))),
            num_micro_batches=self.num_micro_batches,
            comm=(self.delay,) * num_stages,
            layers=(4 // num_stages,) * num_stages,
            pair=self.pair,
            bound=self.bound(place),
            **kinds,
        )


CASES = tuple(
    Case(model, Fraction(comm), Fraction(pair), Fraction(room), count)
    for count, model, comm, pair, room in product(
        (1, 2, 3, 4),
        MODELS,
        ("0", "0.2", "1"),
        ("1", "0.9", "0.8"),
        ("1", "1.5", "2", "2.5", "4"),
    )
)


def optima() -> dict[str, list[float]]:
    """By placement, in the order of CASES."""
    found: dict[str, list[float]] = json.loads(FILE.read_text())
    return found
