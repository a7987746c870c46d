"""Playing lowered rows: a machine that decides whether they end, and when each slot runs.

Posting never blocks. A send is posted after its slot and a receive before one; each waits in a
lane, first in first out, at its own end, and the message completes once both of its ends are at the
head of their lanes. A slot starts when its rank is free, its receives are complete and what it
needs of its own rank is there. So a rank that can never start its next slot stops there.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pith.schedule.costs import Costs, Number, at
from pith.schedule.lower import Message, Step, arrival
from pith.schedule.table import Kind, Op, Slot, Table

# What shares a lane on a rank: the messages of one direction of a pair of ranks (a communicator
# for each), those of a pair, or all messages of the rank (one communicator for everything).
Lane = Literal["direction", "pair", "rank"]


@dataclass(frozen=True, slots=True)
class Played:
    """What ran, and what did not.

    times     start and end of the slots that ran, by rank and in the order of its row
    blocked   for each rank that stopped early its next slot and the first input that is missing
    heads     for each rank with an unfinished lane the message at the head of the first
    """

    times: tuple[tuple[tuple[Number, Number], ...], ...]
    blocked: dict[int, tuple[Slot, str]]
    heads: dict[int, Message]


def play(
    table: Table, steps: tuple[tuple[Step, ...], ...], *, costs: Costs, lane: Lane = "direction"
) -> Played:
    """Run lowered rows until all have ended or none can go on.

    Lanes decide what can run, never when: a message is there `comm` after the slot that sends it.
    """
    player = _Player(table, costs, lane)
    times: list[list[tuple[Number, Number]]] = [[] for _ in steps]
    walks = [player.walk(row, spans) for row, spans in zip(steps, times, strict=True)]
    num_run, missing = -1, [""] * len(steps)
    while num_run < player.num_run:
        num_run = player.num_run
        missing = [next(walk, "") for walk in walks]
    blocked = {
        rank: (steps[rank][len(times[rank])].slot, text)
        for rank, text in enumerate(missing)
        if text
    }
    unfinished = sorted(((end, queue[0]) for end, queue in player.lanes.items() if queue))
    return Played(tuple(map(tuple, times)), blocked, {end[0]: m for end, m in unfinished[::-1]})


class _Player:
    """The lanes of one play, and what is there: results of operations and complete messages."""

    def __init__(self, table: Table, costs: Costs, lane: Lane) -> None:
        self.table = table
        self.costs = costs
        self.lane = lane
        self.lanes: dict[tuple[int, ...], deque[Message]] = defaultdict(deque)
        self.ends: dict[tuple[int, int], tuple[deque[Message], deque[Message]]] = {}
        self.due: dict[Message, Number] = {}
        self.there: dict[Op | Message, Number] = {}
        self.num_run = 0

    def walk(self, row: tuple[Step, ...], times: list[tuple[Number, Number]]) -> Iterator[str]:
        """Run a row, adding to `times`; yields the name of a missing input while there is one."""
        clock: Number = 0
        for step in row:
            for message in step.post:
                self._enqueue(message, self._ends(message)[1])
            start = clock
            for need in _inputs(self.table, step.slot):
                while need not in self.there:
                    yield _name(need)
                start = max(start, self.there[need])
            clock = start + self.costs.slot(step.slot)
            times.append((start, clock))
            self.num_run += 1
            for op in step.slot:
                self.there[_result(op)] = clock
            for message in step.sends:
                self.due[message] = clock + at(self.costs.comm, message.sending_stage)
                self._enqueue(message, self._ends(message)[0])

    def _enqueue(self, message: Message, lane: deque[Message]) -> None:
        """Post a send or a receive in its lane; complete what then can be."""
        lane.append(message)
        heads = [message] if len(lane) == 1 else []
        while heads:
            sent, received = self._ends(heads.pop())
            if sent and received and (sent[0] is received[0] or sent[0] == received[0]):
                message = sent.popleft()
                received.popleft()
                self.there[message] = self.due[message]
                heads += [lane[0] for lane in (sent, received) if lane]

    def _ends(self, message: Message) -> tuple[deque[Message], deque[Message]]:
        """The lane in which `message` is sent and the one in which it is received."""
        channel = message.source, message.target
        if channel not in self.ends:
            source, target = _keys(self.lane, *channel)
            self.ends[channel] = self.lanes[source], self.lanes[target]
        return self.ends[channel]


def _keys(lane: Lane, source: int, target: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What names the lanes of a channel at its two ends; a rank comes first."""
    match lane:
        case "direction":
            return (source, source, target), (target, source, target)
        case "pair":
            return (source, target), (target, source)
        case "rank":
            return (source,), (target,)


def _result(op: Op) -> Op:
    """What an operation leaves behind for others; B and I both leave the input gradient."""
    return Op(Kind.B, op.stage, op.micro) if op.kind is Kind.I else op


def _inputs(table: Table, slot: Slot) -> list[Op | Message]:
    """What must be there for `slot`: messages that it receives and results of its own rank."""
    inputs: list[Op | Message] = []
    for op in slot:
        message = arrival(table, op)
        inputs += [message] if message else []
        if op.kind is Kind.W:
            inputs.append(Op(Kind.B, op.stage, op.micro))
        elif op.kind is not Kind.F:
            inputs.append(Op(Kind.F, op.stage, op.micro))
            if not message and op.stage != table.placement.num_stages - 1:
                inputs.append(Op(Kind.B, op.stage + 1, op.micro))
        elif op.stage and not message:
            inputs.append(Op(Kind.F, op.stage - 1, op.micro))
    return inputs


def _name(need: Op | Message) -> str:
    """How a missing input is named; either B or I leaves a gradient."""
    is_gradient = isinstance(need, Op) and need.kind is Kind.B
    return f"{'B or I'}{need.stage}.{need.micro}" if is_gradient else str(need)
