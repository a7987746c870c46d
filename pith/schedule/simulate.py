"""Simulation: when every slot of a table would run, and what it would hold, given costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from pith.errors import RunFailedError
from pith.schedule.costs import Costs, Number, at
from pith.schedule.lower import lower_rows
from pith.schedule.play import play
from pith.schedule.table import Kind, Op, Slot, Table, slot_text

UNIT = Costs()  # F = I = W = 1, messages take no time, a stage of a micro-batch is one


@dataclass(frozen=True, slots=True)
class Span:
    """A slot from `start` to `end`, in time units."""

    slot: Slot
    start: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Simulation:
    """When every slot of a table runs. `rows[rank]` holds the spans of a rank, in its order."""

    table: Table
    costs: Costs
    rows: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Number:
        """The end of the last slot."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def work(self) -> tuple[Number, ...]:
        """The busy time of each rank."""
        return tuple(sum(self.costs.slot(span.slot) for span in row) for row in self.rows)

    @property
    def idle(self) -> tuple[Number, ...]:
        """The time of each rank, up to the makespan, in which it waits or has ended."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def bubble(self) -> Number:
        """The makespan less the work of the busiest rank."""
        return self.makespan - max(self.work, default=0)

    @property
    def efficiency(self) -> float:
        """The mean work of the ranks, as if nothing ran in pairs, by the makespan.

        1 where no rank ever idles; a gain from pairs can bring it above 1, uneven stages below.
        """
        alone = sum(self.costs.operation(op) for row in self.rows for s in row for op in s.slot)
        return float(alone / (len(self.rows) * self.makespan)) if self.makespan else 1.0

    @property
    def peak_live(self) -> tuple[Number, ...]:
        """The most activations that each rank holds at once; see `live`."""
        return tuple(max(live(row, self.costs), default=0) for row in self.table.rows)

    @property
    def peak_w_store(self) -> tuple[Number, ...]:
        """The most that each rank keeps at once for weight gradients still to run."""
        return tuple(max(_w_store(row, self.costs), default=0) for row in self.table.rows)


def simulate(table: Table, costs: Costs = UNIT) -> Simulation:
    """Run `table` in simulated time. Raises RunFailedError when a rank can never finish its row."""
    played = play(table, lower_rows(table), costs=costs)
    if played.blocked:
        rank, (slot, missing) = next(iter(played.blocked.items()))
        raise RunFailedError(
            "schedule.deadlock",
            what="the schedule cannot finish",
            found=f"rank {rank} stops at {slot_text(slot)}, waiting for {missing}",
            wanted="an order in which every slot can start",
            where=f"schedule {table.name}",
        )
    rows = (map(_span, row, times) for row, times in zip(table.rows, played.times, strict=True))
    return Simulation(table, costs, tuple(map(tuple, rows)))


def _span(slot: Slot, times: tuple[Number, Number]) -> Span:
    return Span(slot, *times)


def live(row: tuple[Slot, ...], costs: Costs = UNIT) -> tuple[Number, ...]:
    """The most activations held during each slot of a row.

    A forward adds those of its stage, B frees them; I frees all but what W needs, and W the rest.
    By default I frees nothing and a stage counts one, the convention of published peaks. In a
    pair the two operations take turns layer by layer, the backward first, so that it holds both
    stages only as far as one has more layers than the other.
    """
    held: Number = 0
    counts = []
    for slot in row:
        peak = max(held, held + _most_added(slot, costs))
        held += sum(_change(op, costs) for op in slot)
        counts.append(max(peak, held))
    return tuple(counts)


def _most_added(slot: Slot, costs: Costs) -> Number:
    """The most that a slot holds more than was held before, layers of a pair in turns."""
    changes = [_change(op, costs) for op in slot]
    layers = [max(1, int(at(costs.layers, op.stage))) for op in slot]
    # Between the ends of the two operations the sum goes straight up or down.
    return max(
        sum(c if done >= n else c * done / n for c, n in zip(changes, layers, strict=True))
        for done in (1, *layers)
    )


def _change(op: Op, costs: Costs) -> Number:
    """What one operation adds to the activations held."""
    whole, kept = at(costs.activation, op.stage), at(costs.w_store, op.stage)
    match op.kind:
        case Kind.F:
            return whole
        case Kind.B:
            return -whole
        case Kind.I:
            return kept - whole
        case Kind.W:
            return -kept


def _w_store(row: tuple[Slot, ...], costs: Costs) -> Iterator[Number]:
    """What is kept for weight gradients after each slot of a row."""
    kept: Number = 0
    for slot in row:
        for op in slot:
            if op.kind in (Kind.I, Kind.W):
                kept += at(costs.w_store, op.stage) * (1 if op.kind is Kind.I else -1)
        yield kept
