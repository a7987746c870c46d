"""Pipeline channels between forked ranks: the right message, whatever order it is asked for in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.channels import Transport, Wire, open_channels
from pith.comm.world import World
from pith.schedule.lower import Message
from pith.schedule.table import Kind

CPU = torch.device("cpu")
WIRE = Wire(((2, 3), (4,)), torch.float64, CPU, staged=False, headers=True)
BOTH_WAYS = ((0, 1), (1, 0))
WIRES = {
    "checked": WIRE,
    "without headers": replace(WIRE, headers=False),
    "staged": replace(WIRE, staged=True),
    "bfloat16": replace(WIRE, dtype=torch.bfloat16),
    "one tensor": replace(WIRE, shapes=((3, 2, 2),)),
}


def connect(
    wire: Wire, pairs: tuple[tuple[int, int], ...], pipeline: tuple[int, ...]
) -> tuple[Transport, int]:
    """The transport of this rank and its place in the pipeline."""
    groups = open_channels(pairs, pipeline=pipeline, world=World.joined(CPU))
    rank = pipeline.index(dist.get_rank())
    return Transport(wire, rank=rank, pipeline=pipeline, groups=groups), rank


def activation(micro: int, *, source: int = 0, target: int = 1) -> Message:
    return Message(Kind.F, target, micro, source, target)


def gradient(micro: int, *, source: int = 1, target: int = 0) -> Message:
    return Message(Kind.B, target, micro, source, target)


def content(message: Message, wire: Wire) -> tuple[Tensor, ...]:
    """Numbers that no other message carries."""
    seed = list(Kind).index(message.kind) * 1000 + message.stage * 100 + message.micro
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape, dtype in wire.layout())


def same(found: tuple[Tensor, ...], message: Message, wire: Wire) -> bool:
    wanted = content(message, wire)
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def objection(call: Callable[..., Any], *args: Any) -> str:
    """What the assertion says that `call` fails with."""
    with pytest.raises(AssertionError) as caught:
        call(*args)
    return str(caught.value)


def consume_out_of_order(transport: Transport, rank: int, *, wire: Wire) -> dict[str, bool]:
    forth, back = [activation(micro) for micro in range(5)], gradient(7)
    taken: dict[str, bool] = {}

    def take(*messages: Message) -> None:
        for message in messages:
            taken[str(message)] = same(transport.take(message), message, wire)

    if rank == 0:
        for message in forth:
            transport.send(message, content(message, wire))
        transport.post([back])
        take(back)
    else:
        transport.post(forth[:3])
        take(forth[2], forth[0])
        transport.send(back, content(back, wire))
        transport.post(forth[3:])
        take(forth[4], forth[1], forth[3])
    transport.flush()
    return taken


def consume_all(pipeline: tuple[int, int]) -> dict[str, dict[str, bool]]:
    opened = {name: connect(wire, BOTH_WAYS, pipeline) for name, wire in WIRES.items()}
    return {name: consume_out_of_order(*opened[name], wire=wire) for name, wire in WIRES.items()}


@pytest.mark.parametrize("pipeline", [(0, 1), (1, 0)])
def test_messages_taken_in_another_order_than_sent_carry_their_own_content(run_ranks, pipeline):
    outcomes = run_ranks(2, consume_all, pipeline)
    sent = {
        0: [str(gradient(7))],
        1: [str(activation(micro)) for micro in (2, 0, 4, 1, 3)],
    }
    for rank, name in ((rank, name) for rank in sent for name in WIRES):
        wanted = dict.fromkeys(sent[rank], True)
        assert outcomes[pipeline[rank]][name] == wanted, f"rank {rank}, {name}"


def misuse(transport: Transport, rank: int, *, wire: Wire) -> dict[str, str]:
    said: dict[str, str] = {}
    if rank == 0:
        message = activation(0)
        good = content(message, wire)
        said["shape"] = objection(transport.send, message, (good[0].t(), good[1]))
        said["missing"] = objection(transport.send, message, good[:1])
        said["dtype"] = objection(transport.send, message, tuple(t.float() for t in good))
        for micro in (0, 1, 2):
            transport.send(activation(micro), content(activation(micro), wire))
        transport.flush()
        return said
    said["not posted"] = objection(transport.take, activation(0))
    transport.post([activation(1)])  # the sender's row says 0
    if wire.headers:
        said["header"] = objection(transport.take, activation(1))
    else:
        said["silent"] = str(same(transport.take(activation(1)), activation(0), wire))
    transport.post([activation(1)])
    said["posted"] = objection(transport.flush)
    transport.post([activation(2)])
    transport.take(activation(2))
    said["held"] = objection(transport.flush)
    transport.take(activation(1))
    transport.flush()
    return said


def misuse_both() -> dict[bool, dict[str, str]]:
    wires = {headers: replace(WIRE, headers=headers) for headers in (True, False)}
    # All are open before the first can fail: a rank whose peer is gone waits long for a group.
    opened = {headers: connect(wire, BOTH_WAYS, (0, 1)) for headers, wire in wires.items()}
    return {headers: misuse(*opened[headers], wire=wires[headers]) for headers in wires}


def test_a_message_that_is_wrong_unused_or_not_as_announced_is_an_assertion(run_ranks):
    sender, receiver = run_ranks(2, misuse_both)
    for headers in (True, False):
        sent = sender[headers]
        assert "found (((3, 2), torch.float64), ((4,), torch.float64))" in sent["shape"]
        assert "found (((2, 3), torch.float64),)," in sent["missing"]
        assert "found (((2, 3), torch.float32), ((4,), torch.float32))" in sent["dtype"]
        assert all("wanted (((2, 3), torch.float64), (" in words for words in sent.values())
        said = receiver[headers]
        assert said["not posted"] == f"{activation(0)} was never posted"
        assert f"posted and never used: {activation(1)}" in said["posted"]
        assert "received and never used" in said["held"]
        assert "micro=1" in said["held"]
    header = receiver[True]["header"]
    assert f"wanted {activation(1)}" in header, "names what was expected"
    assert "found header (0, 1, 0)" in header, "names what came: kind, stage, micro-batch"
    assert receiver[False]["silent"] == "True", "why tests run with headers"


def keep_in_flight() -> list[bool]:
    """Large messages that cannot leave before the receiver asks, from tensors soon let go."""
    wire = replace(WIRE, shapes=((512, 1024),))
    transport, rank = connect(wire, BOTH_WAYS, (0, 1))
    messages = [activation(micro) for micro in range(6)]
    if rank == 0:
        kept = []
        for message in messages:
            (tensor,) = content(message, wire)
            column_major = tensor.t().contiguous().t()
            assert not column_major.is_contiguous()
            transport.send(message, (column_major,))
            kept.append(tensor)
            transport.send(gradient(message.micro, source=0, target=1), (tensor,))
            del column_major
        garbage = [torch.full((512, 1024), torch.nan, dtype=torch.float64) for _ in messages]
        dist.barrier()
        transport.flush()
        del garbage
        return [same((t,), m, wire) for t, m in zip(kept, messages, strict=True)]
    dist.barrier()
    pairs = [(message, gradient(message.micro, source=0, target=1)) for message in messages]
    transport.post([message for pair in pairs for message in pair])
    found = [
        (message, transport.take(one), transport.take(two))
        for message, (one, two) in zip(messages, pairs, strict=True)
    ]
    transport.flush()
    return [same(one, message, wire) and same(two, message, wire) for message, one, two in found]


def test_neither_end_overwrites_what_was_sent_or_received(run_ranks):
    assert run_ranks(2, keep_in_flight) == [[True] * 6] * 2


def uneven() -> list[bool]:
    """Rank 1 talks to both others; channel 2 to 1 carries nothing, 0 to 1 twice as much."""
    pairs = ((0, 1), (1, 0), (1, 2), (2, 1))
    transport, rank = connect(WIRE, pairs, (2, 0, 1))
    right = []
    from_0 = [activation(micro) for micro in range(6)]
    to_2 = [activation(micro, source=1, target=2) for micro in (3, 1, 0)]
    match rank:
        case 0:
            for message in from_0:
                transport.send(message, content(message, WIRE))
        case 1:
            transport.post(from_0)
            for message, other in zip(reversed(from_0), [*to_2, None, None, None], strict=True):
                right.append(same(transport.take(message), message, WIRE))
                if other is not None:
                    transport.send(other, content(other, WIRE))
        case 2:
            transport.post(to_2)
            right += [same(transport.take(m), m, WIRE) for m in (to_2[1], to_2[2], to_2[0])]
    transport.flush()
    return right


def test_channels_of_three_ranks_are_used_unevenly_or_not_at_all(run_ranks):
    outcomes = run_ranks(3, uneven)
    assert [outcomes[rank] for rank in (2, 0, 1)] == [[], [True] * 6, [True] * 3]
