"""Simulation: when every slot of a table would run, and what it would hold, given costs.

The player below is also the judge of deadlock: it moves messages through channels as the engine
does, and a rank that cannot start its next slot stops there.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pith.errors import RunFailedError
from pith.schedule.costs import Costs, Number, at
from pith.schedule.lower import Message, Step, arrival, lower
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
    steps = tuple(lower(table, rank) for rank in range(table.placement.pp))
    played = play(table, steps, costs=costs)
    if played.blocked:
        rank, (slot, missing) = next(iter(played.blocked.items()))
        raise RunFailedError(
            "schedule.deadlock",
            what="the schedule cannot finish",
            found=f"rank {rank} stops at {slot_text(slot)}, waiting for {missing}",
            wanted="an order in which every slot can start",
            where=f"schedule {table.name}",
        )
    return Simulation(table, costs, played.rows)


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
    return max(
        sum(c if done >= n else c * done / n for c, n in zip(changes, layers, strict=True))
        for done in range(1, max(layers) + 1)
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


@dataclass(frozen=True, slots=True)
class Played:
    """What ran, and for each rank that stopped early its next slot and the first missing input."""

    rows: tuple[tuple[Span, ...], ...]
    blocked: dict[int, tuple[Slot, str]]


def play(table: Table, steps: tuple[tuple[Step, ...], ...], *, costs: Costs) -> Played:
    """Run lowered rows until all have ended or none can go on.

    Sends never block. The n-th receive posted on a channel gets the n-th message sent on it. A slot
    starts when its rank is free and all inputs of its operations are there.
    """
    player = _Player(table, costs)
    rows: list[list[Span]] = [[] for _ in steps]
    moving = True
    while moving:
        moving = False
        for spans, row in zip(rows, steps, strict=True):
            while len(spans) < len(row) and (span := player.run(row[len(spans)], after=spans)):
                spans.append(span)
                moving = True
    blocked = {
        rank: (row[len(spans)].slot, player.missing(row[len(spans)].slot))
        for rank, (spans, row) in enumerate(zip(rows, steps, strict=True))
        if len(spans) < len(row)
    }
    return Played(tuple(map(tuple, rows)), blocked)


class _Player:
    """The channels and the finished operations of one play."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table = table
        self.costs = costs
        self.done: set[tuple[Kind, int, int]] = set()
        self.sent: dict[tuple[int, int], list[tuple[Message, Number]]] = defaultdict(list)
        self.num_posted: dict[tuple[int, int], int] = defaultdict(int)
        self.turn: dict[Message, int] = {}  # the place of its receive on its channel

    def run(self, step: Step, *, after: list[Span]) -> Span | None:
        """Run a step behind the spans of its rank; None while an input is missing."""
        for message in step.post:
            if message not in self.turn:
                channel = (message.source, message.target)
                self.turn[message] = self.num_posted[channel]
                self.num_posted[channel] += 1
        if self.missing(step.slot):
            return None
        arrivals = [self.received(m) for op in step.slot if (m := arrival(self.table, op))]
        start = max([after[-1].end if after else 0, *(time or 0 for time in arrivals)])
        span = Span(step.slot, start, start + self.costs.slot(step.slot))
        self.done.update(_result(op) for op in step.slot)
        for message in step.sends:
            channel = (message.source, message.target)
            delay = at(self.costs.comm, message.sending_stage)
            self.sent[channel].append((message, span.end + delay))
        return span

    def received(self, message: Message) -> Number | None:
        """When `message` is there; None when it is not, or when its receive got another one."""
        sent = self.sent[message.source, message.target]
        turn = self.turn.get(message, len(sent))
        return sent[turn][1] if turn < len(sent) and sent[turn][0] == message else None

    def missing(self, slot: Slot) -> str:
        """The first input of `slot` that is not there yet; empty when all are."""
        for op in slot:
            message = arrival(self.table, op)
            if message and self.received(message) is None:
                return str(message)
            for kind, stage, micro in _local_inputs(self.table, op, has_message=bool(message)):
                if (kind, stage, micro) not in self.done:
                    return f"{'B or I' if kind is Kind.B else kind}{stage}.{micro}"
        return ""


def _result(op: Op) -> tuple[Kind, int, int]:
    """What an operation leaves behind for others; B and I both leave the input gradient."""
    return (Kind.B if op.kind is Kind.I else op.kind, op.stage, op.micro)


def _local_inputs(table: Table, op: Op, *, has_message: bool) -> list[tuple[Kind, int, int]]:
    """The results of its own rank that `op` needs."""
    if op.kind is Kind.W:
        return [(Kind.B, op.stage, op.micro)]
    if op.kind is Kind.F:
        return [(Kind.F, op.stage - 1, op.micro)] if op.stage and not has_message else []
    own = (Kind.F, op.stage, op.micro)
    is_last = op.stage == table.placement.num_stages - 1
    return [own] if is_last or has_message else [own, (Kind.B, op.stage + 1, op.micro)]
