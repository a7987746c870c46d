"""Lowering for one communicator: all messages in one order that both ends of each keep.

A communicator that sends and receives one thing at a time stops for ever when two ranks put their
messages into it in different orders. So there is one order for the whole table, by the end of the
slot that sends in a simulated run, and every rank puts in its sends and receives in that order. A
message is then never behind one that depends on it.
"""

from collections import defaultdict
from collections.abc import Sequence

from pith.schedule.costs import Number
from pith.schedule.lower import Message, Step, lower_rows
from pith.schedule.play import play
from pith.schedule.simulate import UNIT
from pith.schedule.table import Table


def lower_mirrored(table: Table) -> tuple[tuple[Step, ...], ...]:
    """The rows of all ranks with sends and receives for one communicator.

    Meant for tables that verify accepts.
    """
    steps = lower_rows(table)
    played = play(table, steps, costs=UNIT)
    assert not played.blocked, f"{table.name} cannot end: {played.blocked}"
    return mirrored(steps, times=played.times)


def mirrored(
    steps: tuple[tuple[Step, ...], ...], *, times: Sequence[Sequence[tuple[Number, Number]]]
) -> tuple[tuple[Step, ...], ...]:
    """The same rows with their receives moved to where the simulated run has them sent.

    `times` are start and end of every slot. Slots that end together count by rank. A receive is
    posted before the first slot of its rank that ends after the one which sends.
    """
    ends = sorted(
        (end, rank, turn) for rank, row in enumerate(times) for turn, (_, end) in enumerate(row)
    )
    posts: list[dict[int, tuple[Message, ...]]] = [defaultdict(tuple) for _ in steps]
    num_ended = [0] * len(steps)
    for _, rank, turn in ends:
        num_ended[rank] += 1
        for message in steps[rank][turn].sends:
            posts[message.target][num_ended[message.target]] += (message,)
    return tuple(
        tuple(Step(step.slot, post[turn], step.sends) for turn, step in enumerate(row))
        for row, post in zip(steps, posts, strict=True)
    )
