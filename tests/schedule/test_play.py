"""The machine that plays lowered rows stops exactly where waiting goes round in a circle."""

import random
from collections import defaultdict, deque
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import get_args

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.costs import Costs
from pith.schedule.lower import Message, Step, arrival, lower_rows
from pith.schedule.mirror import lower_mirrored
from pith.schedule.play import Lane, play
from pith.schedule.table import Kind, Op, Table

Rows = tuple[tuple[Step, ...], ...]
LANES = get_args(Lane)
SIZES = [(pp, m) for pp in (2, 3, 4, 6) for m in (2, 3, 2 * pp, 2 * pp + 3)]


def ends(table: Table, steps: Rows, *, lane: Lane) -> bool:
    played = play(table, steps, costs=Costs(), lane=lane)
    assert bool(played.blocked) <= bool(played.heads)
    return not played.blocked and not played.heads


def just_in_time(table: Table) -> Rows:
    """Receives posted in the sender's order, each channel only as far as the slot needs."""
    rows = []
    for row in lower_rows(table):
        channel: dict[int, deque[Message]] = defaultdict(deque)
        for message in (m for step in row for m in step.post):
            channel[message.source].append(message)
        steps = []
        for step in row:
            post = []
            for need in filter(None, (arrival(table, op) for op in step.slot)):
                while need in channel[need.source]:
                    post.append(channel[need.source].popleft())
            steps.append(replace(step, post=tuple(post)))
        rows.append(tuple(steps))
    return tuple(rows)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lowering", [lower_rows, just_in_time])
def test_a_lane_for_each_direction_never_stops(name, lowering):
    for pp, num_micro_batches in SIZES:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        assert ends(table, lowering(table), lane="direction")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lane", LANES)
def test_the_mirrored_order_never_stops_on_any_lane(name, lane):
    for pp, num_micro_batches in [(1, 3), *SIZES]:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        assert ends(table, lower_mirrored(table), lane=lane)


@pytest.mark.parametrize("lane", ["pair", "rank"])
def test_on_a_shared_lane_the_order_of_directions_stops_almost_always(lane):
    names = ("gpipe", "1f1b", "1f1b-pair", "interleaved", "zb-h1", "zbv", "dualpipev")
    tables = [build(n, pp=pp, num_micro_batches=m) for n in names for pp, m in SIZES if m > 2]
    ended = [table.name for table in tables if ends(table, lower_rows(table), lane=lane)]
    assert set(ended) <= {"interleaved"}
    assert len(ended) < 0.1 * len(tables)
    ended = [table.name for table in tables if ends(table, just_in_time(table), lane=lane)]
    assert set(ended) == {"gpipe"}


def test_a_lane_for_each_pair_can_end_where_one_for_each_rank_stops():
    table = build("interleaved", pp=3, num_micro_batches=6)
    assert ends(table, lower_rows(table), lane="pair")
    assert not ends(table, lower_rows(table), lane="rank")


Node = tuple[int, int] | Message  # a slot by rank and position, or a message


def graph(table: Table, steps: Rows, *, lane: Lane) -> dict[Node, set[Node]]:
    """For each slot and message what must be over first: from the definition alone."""
    before: dict[Node, set[Node]] = defaultdict(set)
    made = {
        (op.kind is Kind.F, op.stage, op.micro): (rank, turn)
        for rank, row in enumerate(steps)
        for turn, step in enumerate(row)
        for op in step.slot
        if op.kind is not Kind.W
    }
    for rank, row in enumerate(steps):
        last: dict[tuple[int, ...], Message] = {}
        for turn, step in enumerate(row):
            here, previous = (rank, turn), {(rank, turn - 1)} if turn else set()
            before[here] |= previous
            for op in step.slot:
                before[here] |= inputs(table, op, made)
            for message, posted in [
                *((m, previous) for m in step.post),
                *((m, {here}) for m in step.sends),
            ]:
                key = {"rank": (), "pair": (message.source + message.target,)}.get(
                    lane, (message.source, message.target)
                )
                before[message] |= posted | ({last[key]} if key in last else set())
                last[key] = message
    return before


def inputs(table: Table, op: Op, made: dict[tuple[bool, int, int], tuple[int, int]]) -> set[Node]:
    stage, micro = op.stage, op.micro
    if op.kind is Kind.W:
        return {made[False, stage, micro]}
    own = set() if op.kind is Kind.F else {made[True, stage, micro]}
    if message := arrival(table, op):
        return {*own, message}
    other = (True, stage - 1, micro) if op.kind is Kind.F else (False, stage + 1, micro)
    return own | ({made[other]} if other in made else set())


def shuffled(steps: Rows, chance: random.Random) -> Rows:
    """Two receives of one rank change places, or one is posted elsewhere."""
    rank = chance.randrange(len(steps))
    posts = [list(step.post) for step in steps[rank]]
    places = [(turn, number) for turn, post in enumerate(posts) for number in range(len(post))]
    (turn, number), (to, other) = sorted(chance.choices(places, k=2))
    if chance.random() < 0.5:
        posts[turn][number], posts[to][other] = posts[to][other], posts[turn][number]
    else:
        posts[to].append(posts[turn].pop(number))
    row = tuple(replace(s, post=tuple(p)) for s, p in zip(steps[rank], posts, strict=True))
    return (*steps[:rank], row, *steps[rank + 1 :])


def is_circle(before: dict[Node, set[Node]]) -> bool:
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lane", LANES)
def test_play_stops_exactly_when_its_graph_has_a_circle(name, lane):
    chance = random.Random(f"{name} {lane}")
    verdicts = set()
    for number in range(60):
        table = build(name, pp=chance.randint(2, 4), num_micro_batches=chance.randint(2, 5))
        steps = lower_mirrored(table) if number % 3 else lower_rows(table)
        for _ in range(chance.randrange(3)):
            steps = shuffled(steps, chance)
        assert ends(table, steps, lane=lane) != is_circle(graph(table, steps, lane=lane))
        verdicts.add(ends(table, steps, lane=lane))
    assert verdicts == {True, False}


def test_a_stop_names_the_slot_the_input_and_the_head_of_the_lane():
    table = build("1f1b", pp=2, num_micro_batches=2)
    played = play(table, lower_rows(table), costs=Costs(), lane="rank")
    gradient, activation = Message(Kind.B, 0, 0, 1, 0), Message(Kind.F, 1, 1, 0, 1)
    assert played.blocked == {
        0: ((Op(Kind.B, 0, 0),), str(gradient)),
        1: ((Op(Kind.F, 1, 1),), str(activation)),
    }
    assert played.heads == {0: gradient, 1: activation}
    assert played.times == (((0, 1), (1, 2)), ((1, 2), (2, 4)))
