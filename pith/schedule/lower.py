"""Lowering: the sends and receives that a table implies.

F of stage s hands its output to F of stage s + 1; B or I of stage s hands its gradient to stage
s - 1. When both stages are on one rank nothing is sent. Every directed pair of ranks is a channel
of its own that delivers in order, so the receiver must post its receives in the order in which the
sender's row sends, whatever order it consumes them in. Receives are posted one slot ahead.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
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

    @property
    def sending_stage(self) -> int:
        return self.stage - 1 if self.kind is Kind.F else self.stage + 1

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
    """The row of `rank` with its sends and receives, for one channel a direction."""
    return lower_rows(table)[rank]


def lower_rows(table: Table) -> tuple[tuple[Step, ...], ...]:
    """The rows of all ranks with their sends and receives. Meant for tables that verify accepts.

    Before slot t every channel into a rank has its receives posted up to the last message that
    slots up to t + 1 need; a message that comes before its turn is held.
    """
    sends = [[_sends(table, slot) for slot in row] for row in table.rows]
    queues: dict[tuple[int, int], list[Message]] = defaultdict(list)
    place: dict[Message, int] = {}
    for message in (m for row in sends for leaving in row for m in leaving):
        queue = queues[message.source, message.target]
        queue.append(message)
        place.setdefault(message, len(queue))
    rows = []
    for row, leaving in zip(table.rows, sends, strict=True):
        posts = _posts(table, row, queues=queues, place=place)
        rows.append(tuple(map(Step, row, posts, leaving)))
    return tuple(rows)


def _posts(
    table: Table,
    row: tuple[Slot, ...],
    *,
    queues: Mapping[tuple[int, int], list[Message]],
    place: Mapping[Message, int],
) -> Iterator[tuple[Message, ...]]:
    """The receives to post before each slot of a row, one slot ahead of their use."""
    needs = [tuple(m for op in slot if (m := arrival(table, op))) for slot in row]
    posted: dict[tuple[int, int], int] = defaultdict(int)
    for turn in range(len(row)):
        post: list[Message] = []
        for message in (m for need in needs[turn : turn + 2] for m in need):
            channel = message.source, message.target
            start, end = posted[channel], place.get(message, 0)
            if end > start:
                post += queues[channel][start:end]
                posted[channel] = end
        yield tuple(post)


def channels(table: Table) -> tuple[tuple[int, int], ...]:
    """The directed rank pairs that carry a message, sorted: (source, target)."""
    messages = (m for row in table.rows for slot in row for m in _sends(table, slot))
    return tuple(sorted({(m.source, m.target) for m in messages}))


def _message(table: Table, kind: Kind, micro: int, *, source: int, target: int) -> Message | None:
    """The message from stage `source` to stage `target`, if both exist, on different ranks."""
    place = table.placement
    if not (0 <= source < place.num_stages and 0 <= target < place.num_stages):
        return None
    sender, receiver = place.rank(source, micro), place.rank(target, micro)
    return Message(kind, target, micro, sender, receiver) if sender != receiver else None


def _sends(table: Table, slot: Slot) -> tuple[Message, ...]:
    """What leaves after `slot`, in slot order."""
    return tuple(m for op in slot if (m := departure(table, op)))
