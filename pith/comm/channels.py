"""Pipeline channels: one two-rank process group per direction between neighbouring ranks.

Receives are posted in the order in which the sender's row sends, and held until an operation asks
for them: from three pipeline ranks on, the receiver consumes in another order, and since all
shapes are equal a wrong match would train on without a word.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.world import World
from pith.ops.precision import wide
from pith.schedule.lower import Message
from pith.schedule.table import Kind

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Wire:
    """How messages look on a channel.

    `shapes` are those of a carry's tensors. The first one, hidden states, has `dtype`; all others
    have float32 or wider. `staged`: the group is gloo but tensors live on CUDA, so they pass
    through host memory. `headers` sends (kind, stage, micro-batch) ahead of each message and
    asserts it on arrival.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    staged: bool
    headers: bool

    def layout(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of each tensor of a message."""
        return tuple(
            (shape, self.dtype if index == 0 else wide(self.dtype))
            for index, shape in enumerate(self.shapes)
        )

    def buffers(self) -> Tensors:
        device = torch.device("cpu") if self.staged else self.device
        return tuple(torch.empty(shape, dtype=t, device=device) for shape, t in self.layout())

    def header(self, message: Message | None = None) -> Tensors:
        """The header tensor of `message`, or a buffer for one; nothing when headers are off."""
        if not self.headers:
            return ()
        values = (-1, -1, -1) if message is None else _identity(message)
        device = torch.device("cpu") if self.staged else self.device
        return (torch.tensor(values, dtype=torch.int64, device=device),)


def _identity(message: Message) -> tuple[int, int, int]:
    return list(Kind).index(message.kind), message.stage, message.micro


@dataclass(slots=True)
class Inbox:
    """The receiving end of one channel: messages arrive in the sender's order."""

    wire: Wire
    source: int  # global rank
    group: dist.ProcessGroup
    posted: deque[tuple[Message, Tensors, list[dist.Work]]] = field(default_factory=deque)
    held: dict[Message, Tensors] = field(default_factory=dict)

    def post(self, message: Message) -> None:
        """Start receiving the next message of the channel."""
        buffers = self.wire.header() + self.wire.buffers()
        works = [_started(dist.irecv(b, src=self.source, group=self.group)) for b in buffers]
        self.posted.append((message, buffers, works))

    def take(self, message: Message) -> Tensors:
        """The tensors of `message`, which must have been posted."""
        while message not in self.held:
            assert self.posted, f"{message} was never posted"
            expected, buffers, works = self.posted.popleft()
            for work in works:
                work.wait()
            self.held[expected] = self._opened(expected, buffers)
        return self.held.pop(message)

    def _opened(self, expected: Message, buffers: Tensors) -> Tensors:
        if self.wire.headers:
            header, *rest = buffers
            found = tuple(int(value) for value in header.tolist())
            assert found == _identity(expected), f"wanted {expected}, found header {found}"
            buffers = tuple(rest)
        return tuple(buffer.to(self.wire.device) for buffer in buffers)


@dataclass(slots=True)
class Outbox:
    """The sending end of one channel. Sent tensors stay alive until they have left."""

    wire: Wire
    target: int  # global rank
    group: dist.ProcessGroup
    flying: deque[tuple[Tensors, list[dist.Work]]] = field(default_factory=deque)

    def send(self, message: Message, tensors: Tensors) -> None:
        """Start sending; returns at once."""
        found = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        wanted = self.wire.layout()
        assert found == wanted, f"{message}: found {found}, wanted {wanted}"
        if self.wire.staged:
            tensors = tuple(tensor.cpu() for tensor in tensors)
        parcel = self.wire.header(message) + tuple(tensor.contiguous() for tensor in tensors)
        works = [_started(dist.isend(t, dst=self.target, group=self.group)) for t in parcel]
        self.flying.append((parcel, works))
        while self.flying and all(work.is_completed() for work in self.flying[0][1]):
            self.flying.popleft()

    def flush(self) -> None:
        """Wait until everything has left."""
        while self.flying:
            for work in self.flying.popleft()[1]:
                work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not part of the channel"
    return work


class Transport:
    """All channels of one rank."""

    def __init__(
        self,
        wire: Wire,
        *,
        rank: int,
        pipeline: Sequence[int],
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
    ) -> None:
        """`pipeline` maps pipeline ranks to global ranks; `groups` holds (source, target) pairs
        of pipeline ranks; `rank` is this rank's place in the pipeline."""
        self.inboxes = {
            source: Inbox(wire, pipeline[source], group)
            for (source, target), group in groups.items()
            if target == rank
        }
        self.outboxes = {
            target: Outbox(wire, pipeline[target], group)
            for (source, target), group in groups.items()
            if source == rank
        }

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.inboxes[message.source].post(message)

    def take(self, message: Message) -> Tensors:
        return self.inboxes[message.source].take(message)

    def send(self, message: Message, tensors: Tensors) -> None:
        self.outboxes[message.target].send(message, tensors)

    def flush(self) -> None:
        """End a step: everything sent has left, everything posted was taken."""
        for outbox in self.outboxes.values():
            outbox.flush()
        for inbox in self.inboxes.values():
            assert not inbox.posted, f"receives posted and never used: {inbox.posted[0][0]}"
            assert not inbox.held, f"messages received and never used: {list(inbox.held)}"


def open_channels(
    pairs: Sequence[tuple[int, int]], *, pipeline: Sequence[int], world: World
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """One group per directed pair of pipeline ranks, made in one order and warmed in that order.

    Every rank of the world calls this with the same arguments. Warming builds the connections
    now: a lazy set-up in the middle of a schedule is a known source of hangs.
    """
    warm_on = torch.device("cpu") if world.staged else world.device
    groups = {}
    for source, target in pairs:
        members = [pipeline[source], pipeline[target]]
        group = world.group(members)
        if group is not None:
            groups[source, target] = group
            _warm(group, source=members[0], target=members[1], device=warm_on)
    return groups


def _warm(group: dist.ProcessGroup, *, source: int, target: int, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    if dist.get_rank() == source:
        dist.send(token, dst=target, group=group)
    else:
        dist.recv(token, src=source, group=group)
