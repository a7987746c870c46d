"""Makespan and peak of a table: what `simulate` finds, many times as fast, to compare candidates.

Inputs are looked up instead of moved through channels, and like slots are timed once. For tables
that can end.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from pith.schedule.costs import Costs, Number, at
from pith.schedule.simulate import live
from pith.schedule.table import Kind, Op, Slot, Table


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a slot: its time, the most activations that it adds while it runs, and what it leaves."""

    time: Number
    most: Number
    change: Number

    @classmethod
    def of(cls, slot: Slot, costs: Costs) -> "Facts":
        change = sum(_change(op, costs) for op in slot)
        return cls(costs.slot(slot), live((slot,), costs)[0], change)


def _change(op: Op, costs: Costs) -> Number:
    whole, kept = at(costs.activation, op.stage), at(costs.w_store, op.stage)
    added: dict[Kind, Number] = {Kind.F: whole, Kind.B: -whole, Kind.I: kept - whole, Kind.W: -kept}
    return added[op.kind]


def measure(table: Table, costs: Costs) -> tuple[Number, Number]:
    """The makespan of `table`, and the most activations that one of its ranks holds."""
    known: dict[tuple[Kind, int, int, int], Facts] = {}

    def facts(slot: Slot) -> Facts:
        like = (slot[0].kind, slot[0].stage, slot[-1].stage, len(slot))
        if like not in known:
            known[like] = Facts.of(slot, costs)
        return known[like]

    rows = [list(map(facts, row)) for row in table.rows]
    return _makespan(table, costs, rows), max(map(_peak, rows))


def _peak(row: list[Facts]) -> Number:
    held: Number = 0
    peak: Number = 0
    for facts in row:
        peak = max(peak, held + facts.most)
        held += facts.change
    return peak


def _makespan(table: Table, costs: Costs, facts: list[list[Facts]]) -> Number:
    arrivals = Arrivals(table, costs)
    clocks: list[Number] = [0] * len(table.rows)
    turns = [0] * len(table.rows)
    while any(turn < len(row) for turn, row in zip(turns, table.rows, strict=True)):
        before = turns[:]
        for rank, row in enumerate(table.rows):
            clock, turn = clocks[rank], turns[rank]
            while turn < len(row) and (start := arrivals.start(row[turn], clock)) < inf:
                clock = start + facts[rank][turn].time
                arrivals.send(row[turn], clock)
                turn += 1
            clocks[rank], turns[rank] = clock, turn
        assert turns != before, f"{table.name} cannot end"
    return max(clocks)


class Arrivals:
    """When the inputs of F and of gradients are there, by stage and micro-batch."""

    def __init__(self, table: Table, costs: Costs) -> None:
        place, size, end = table.placement, table.num_micro_batches, table.placement.num_stages
        ranks = [place.rank(stage) for stage in range(end)]
        apart = [before != after for before, after in pairwise(ranks)]
        comm = [at(costs.comm, stage) for stage in range(end)]
        self.up = [*(c if away else 0 for c, away in zip(comm, apart, strict=False)), 0]
        self.down = [0, *(c if away else 0 for c, away in zip(comm[1:], apart, strict=True))]
        # What the last F leaves lets the first gradient start; nobody takes the last gradient.
        self.forward: list[list[Number]] = [[0] * size, *([inf] * size for _ in range(end))]
        self.backward = [*([inf] * size for _ in range(end - 1)), self.forward[end], [inf] * size]

    def start(self, slot: Slot, free: Number) -> Number:
        """When `slot` can start on a rank that is free from `free` on; infinity if unknown."""
        for op in slot:
            if op.kind is Kind.F:
                free = max(free, self.forward[op.stage][op.micro])
            elif op.kind is not Kind.W:
                free = max(free, self.backward[op.stage][op.micro])
        return free

    def send(self, slot: Slot, end: Number) -> None:
        """Send what a slot that ends at `end` leaves for the next stages."""
        for op in slot:
            if op.kind is Kind.F:
                self.forward[op.stage + 1][op.micro] = end + self.up[op.stage]
            elif op.kind is not Kind.W:
                self.backward[op.stage - 1][op.micro] = end + self.down[op.stage]
