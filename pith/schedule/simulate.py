"""Simulation: when every slot of a table would run, given integer costs.

The player below is also the judge of deadlock: it moves messages through channels as the engine
does, and a rank that cannot start its next slot stops there.
"""

from collections import defaultdict
from dataclasses import dataclass

from pith.errors import RunFailedError
from pith.schedule.lower import Message, Step, arrival, lower
from pith.schedule.table import Kind, Op, Slot, Table, slot_text


@dataclass(frozen=True, slots=True)
class Costs:
    """Time units of the parts of one stage. B costs i + w; a message is under way for `comm`."""

    f: int = 1
    i: int = 1
    w: int = 1
    comm: int = 0

    def slot(self, slot: Slot) -> int:
        """The time of a slot; a pair takes the sum of its two operations."""
        times = {Kind.F: self.f, Kind.B: self.i + self.w, Kind.I: self.i, Kind.W: self.w}
        return sum(times[op.kind] for op in slot)


@dataclass(frozen=True, slots=True)
class Span:
    """A slot from `start` to `end`, in time units."""

    slot: Slot
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """`rows[rank]` holds the spans of a rank in the order of its row."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> int:
        """The end of the last slot."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def work(self) -> tuple[int, ...]:
        """The busy time of each rank."""
        return tuple(sum(span.end - span.start for span in row) for row in self.rows)

    @property
    def bubble(self) -> int:
        """The makespan less the work of the busiest rank."""
        return self.makespan - max(self.work, default=0)


def simulate(table: Table, *, f: int = 1, i: int = 1, w: int = 1, comm: int = 0) -> Simulation:
    """Run `table` in simulated time. Raises RunFailedError when a rank can never finish its row."""
    steps = tuple(lower(table, rank) for rank in range(table.placement.pp))
    played = play(table, steps, costs=Costs(f, i, w, comm))
    if played.blocked:
        rank, (slot, missing) = next(iter(played.blocked.items()))
        raise RunFailedError(
            "schedule.deadlock",
            what="the schedule cannot finish",
            found=f"rank {rank} stops at {slot_text(slot)}, waiting for {missing}",
            wanted="an order in which every slot can start",
            where=f"schedule {table.name}",
        )
    return Simulation(played.rows)


def peak_live(table: Table) -> tuple[int, ...]:
    """The most stage activations that each rank holds at once, in stages of one micro-batch."""
    return tuple(max(live(row), default=0) for row in table.rows)


def live(row: tuple[Slot, ...]) -> tuple[int, ...]:
    """Stage activations held during each slot of a row.

    A forward adds one, the weight gradient (B or W) frees it. A pair trades layer for layer, so it
    never holds both.
    """
    held, counts = 0, []
    for slot in row:
        before = held
        held += sum({Kind.F: 1, Kind.I: 0}.get(op.kind, -1) for op in slot)
        counts.append(max(before, held))
    return tuple(counts)


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
        self.sent: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
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
            self.sent[channel].append((message, span.end + self.costs.comm))
        return span

    def received(self, message: Message) -> int | None:
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
