"""TEMPORARY stand-in by the founder until the real auto is written: overwrite this file whole."""

from dataclasses import dataclass
from typing import Any

from pith.schedule.build import build
from pith.schedule.costs import Costs
from pith.schedule.simulate import Simulation, simulate
from pith.schedule.table import Table


@dataclass(frozen=True, slots=True)
class Choice:
    table: Table
    costs: Costs
    simulation: Simulation
    candidates: tuple[Any, ...] = ()


def auto(
    pp: int,
    *,
    num_micro_batches: int,
    costs: Any,
    max_live: Any = None,
    num_stages: int | None = None,
    most_stages: int | None = None,
) -> Choice:
    table = build(
        "1f1b-pair" if pp == 1 else "dualpipev", pp=pp, num_micro_batches=num_micro_batches
    )
    chosen = costs(table.placement)
    return Choice(table, chosen, simulate(table, chosen))
