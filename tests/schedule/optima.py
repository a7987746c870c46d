"""The least makespans of many small problems, two ranks and up to four micro-batches.

    PYTHONPATH=. python tests/schedule/optima.py

searches them all, writes them to data/optima.json and says how far list and auto are from them.
It takes minutes.
"""

import json
import time
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
    """`comm` in parts of a mean F, `room` in parts of what one micro-batch needs on the V."""

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

    @property
    def bound(self) -> Fraction:
        v = PLACES["v"]
        return self.room * Fraction(least_live(v, self.costs(v)))

    def costs(self, place: Placement) -> Costs:
        kinds = self.kinds(place.num_stages)
        comm, pair = float(self.delay), float(self.pair)
        return Costs(**kinds, comm=comm, layers=kinds["activation"], pair=pair)

    def problem(self, place: Placement) -> Problem:
        num_stages = place.num_stages
        kinds = self.kinds(num_stages)
        return Problem(
            ranks=tuple(map(place.rank, range(num_stages))),
            num_micro_batches=self.num_micro_batches,
            comm=(self.delay,) * num_stages,
            layers=kinds["activation"],
            pair=self.pair,
            bound=self.bound,
            **{kind: tuple(map(Fraction, cost)) for kind, cost in kinds.items()},
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


def optima() -> dict[str, list[float | None]]:
    """By placement, in the order of CASES; None where not even one micro-batch fits."""
    found: dict[str, list[float | None]] = json.loads(FILE.read_text())
    return found


def list_makespan(case: Case, place: Placement) -> float:
    costs = case.costs(place)
    table = list_schedule(
        place,
        num_micro_batches=case.num_micro_batches,
        costs=costs,
        max_live=float(case.bound),
    )
    return float(simulate(table, costs).makespan)


def auto_makespan(case: Case) -> float:
    choice = auto(
        2,
        num_micro_batches=case.num_micro_batches,
        costs=case.costs,
        max_live=float(case.bound),
    )
    return float(choice.simulation.makespan)


def main() -> None:
    found: dict[str, list[float | None]] = {}
    for name, place in PLACES.items():
        start = time.perf_counter()
        least = [shortest(case.problem(place)) for case in CASES]
        found[name] = [None if best is None else round(float(best), 6) for best in least]
        seconds = time.perf_counter() - start
        ratios = [
            (list_makespan(case, place) / best, case)
            for case, best in zip(CASES, found[name], strict=True)
            if best is not None
        ]
        worst, case = max(ratios, key=lambda each: each[0])
        print(f"{name}: {seconds:.0f} s; list at most {worst:.4f} of the least: {case}")
    FILE.write_text(json.dumps(found) + "\n")
    least = zip(CASES, found["v"], found["loop 2"], strict=True)
    ratios = [(auto_makespan(case) / min(filter(None, best)), case) for case, *best in least]
    worst, case = max(ratios, key=lambda each: each[0])
    print(f"auto at most {worst:.4f} of the least on v and loop 2: {case}")


if __name__ == "__main__":
    main()
