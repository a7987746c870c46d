"""Lowering: the sends and receives that a table implies.

F of stage s hands its output to F of stage s + 1; B or I of stage s hands its gradient to stage
s - 1. When both stages are on one rank nothing is sent. Every directed pair of ranks is a channel
of its own that delivers in order, so the receiver must post its receives in the order in which the
sender's row sends, whatever order it consumes them in. Receives are posted one slot ahead.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pith.schedule.table import Kind, Op, Slot, Table


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """One tensor between ranks: an activation (kind F) or a gradient (kind B) for `stage`."""

    kind: Kind
    stage: int  # the receiving stage
    micro: int
    source: int
    target: int

    def __str__(self) -> str:
        content = "activation" if self.kind is Kind.F else "gradient"
        return f"{content} {self.stage}.{self.micro} from rank {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Step:
    """A slot with its communication.

    `post` are the receives to post before the slot runs, in posting order; `sends` leave after it.
    """

    slot: Slot
    post: tuple[Message, ...]
    sends: tuple[Message, ...]


def arrival(table: Table, op: Op) -> Message | None:
    """The message that `op` waits for; None when its input is local or it needs none."""
    if op.kind is Kind.F:
        return _message(table, Kind.F, op.micro, source=op.stage - 1, target=op.stage)
    if op.kind is Kind.W:
        return None
    return _message(table, Kind.B, op.micro, source=op.stage + 1, target=op.stage)


def departure(table: Table, op: Op) -> Message | None:
    """The message that `op` sends off; None when its result stays on the rank."""
    if op.kind is Kind.F:
        return _message(table, Kind.F, op.micro, source=op.stage, target=op.stage + 1)
    if op.kind is Kind.W:
        return None
    return _message(table, Kind.B, op.micro, source=op.stage, target=op.stage - 1)


def lower(table: Table, rank: int) -> tuple[Step, ...]:
    """The row of `rank` with its sends and receives. Meant for tables that verify accepts.

    Before slot t every channel into the rank has its receives posted up to the last message that
    slots up to t + 1 need; a message that comes before its turn is held.
    """
    row = table.rows[rank]
    needs = [tuple(m for op in slot if (m := arrival(table, op))) for slot in row]
    sources = sorted({message.source for need in needs for message in need})
    unposted = {source: _sends_to(table, source, rank) for source in sources}
    steps = []
    for turn, slot in enumerate(row):
        first = 0 if turn == 0 else turn + 1
        wanted = {message for need in needs[first : turn + 2] for message in need}
        post = tuple(message for queue in unposted.values() for message in _take(queue, wanted))
        sends = tuple(m for op in slot if (m := departure(table, op)))
        steps.append(Step(slot, post, sends))
    return tuple(steps)


def channels(table: Table) -> tuple[tuple[int, int], ...]:
    """The directed rank pairs that carry a message, sorted: (source, target)."""
    ops = (op for row in table.rows for slot in row for op in slot)
    return tuple(sorted({(m.source, m.target) for op in ops if (m := departure(table, op))}))


def _message(table: Table, kind: Kind, micro: int, *, source: int, target: int) -> Message | None:
    """The message from stage `source` to stage `target`, if both exist, on different ranks."""
    place = table.placement
    if min(source, target) < 0 or max(source, target) >= place.num_stages:
        return None
    sender, receiver = place.rank(source, micro), place.rank(target, micro)
    return Message(kind, target, micro, sender, receiver) if sender != receiver else None


def _sends_to(table: Table, source: int, target: int) -> list[Message]:
    """What `source` sends to `target`, in sending order."""
    ops = (op for slot in table.rows[source] for op in slot)
    return [m for op in ops if (m := departure(table, op)) and m.target == target]


def _take(queue: list[Message], wanted: Iterable[Message]) -> list[Message]:
    """Remove and return the head of `queue` up to the last wanted message in it."""
    count = max((queue.index(message) + 1 for message in wanted if message in queue), default=0)
    head = queue[:count]
    del queue[:count]
    return head
