"""Messages go where the model's order sends them; receives follow the sender."""

from collections import Counter

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.lower import Message, arrival, channels, departure, lower, lower_rows
from pith.schedule.table import Kind, Op, slot_text

SIZES = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 3, 2 * pp - 1, 2 * pp + 3)]


def test_a_small_1f1b_is_lowered_as_by_hand():
    table = build("1f1b", pp=2, num_micro_batches=2)
    lowered = [
        [(slot_text(s.slot), tuple(map(str, s.post)), tuple(map(str, s.sends))) for s in row]
        for row in (lower(table, 0), lower(table, 1))
    ]
    a0, a1 = "activation 1.0 from rank 0 to 1", "activation 1.1 from rank 0 to 1"
    g0, g1 = "gradient 0.0 from rank 1 to 0", "gradient 0.1 from rank 1 to 0"
    assert lowered[0] == [
        ("F0.0", (), (a0,)),
        ("F0.1", (g0,), (a1,)),
        ("B0.0", (g1,), ()),
        ("B0.1", (), ()),
    ]
    assert lowered[1] == [
        ("F1.0", (a0,), ()),
        ("B1.0", (a1,), (g0,)),
        ("F1.1", (), ()),
        ("B1.1", (), (g1,)),
    ]


def test_nothing_is_sent_at_the_turn_of_the_v_nor_past_its_ends():
    table = build("zbv", pp=2, num_micro_batches=3)
    local = ["F0.0", "F2.0", "B3.0", "I3.0", "I1.0", "W0.0", "W2.0"]
    assert [arrival(table, Op.parse(text)) for text in local] == [None] * len(local)
    stays = ["F1.0", "F3.0", "B0.0", "I0.0", "I2.0", "W1.0", "W3.0"]
    assert [departure(table, Op.parse(text)) for text in stays] == [None] * len(stays)
    assert departure(table, Op.parse("F2.1")) == Message(Kind.F, 3, 1, source=1, target=0)
    assert arrival(table, Op.parse("F3.1")) == Message(Kind.F, 3, 1, source=1, target=0)
    assert departure(table, Op.parse("I1.2")) == Message(Kind.B, 0, 2, source=1, target=0)
    assert arrival(table, Op.parse("B0.2")) == Message(Kind.B, 0, 2, source=1, target=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_channel_posts_what_is_sent_in_the_same_order(name):
    for pp, num_micro_batches in SIZES:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        rows = lower_rows(table)
        assert rows == tuple(lower(table, rank) for rank in range(pp))
        used = set()
        for source in range(pp):
            for target in range(pp):
                sent = [m for s in rows[source] for m in s.sends if m.target == target]
                posted = [m for s in rows[target] for m in s.post if m.source == source]
                assert posted == sent
                used |= {(source, target)} if sent else set()
        assert channels(table) == tuple(sorted(used))


@pytest.mark.parametrize(
    ("name", "most", "most_of_one"),
    [
        ("gpipe", 2, 2),
        ("1f1b", 2, 2),
        ("1f1b-pair", 4, 2),
        ("interleaved", 3, 3),  # on two ranks the way round the loop is the same channel
        ("zb-h1", 2, 2),
        ("zbv", 3, 2),
        ("dualpipev", 4, 2),
    ],
)
def test_a_receive_is_posted_before_its_slot_and_few_are_open(name, most, most_of_one):
    for pp, num_micro_batches in SIZES:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        for row in lower_rows(table):
            opened: set[Message] = set()
            for step, following in zip(row, (*row[1:], None), strict=True):
                opened |= set(step.post)
                ahead = following.slot if following else ()
                needed = {m for op in (*step.slot, *ahead) if (m := arrival(table, op))}
                assert needed <= opened
                assert len(opened) <= most
                assert max(Counter(m.source for m in opened).values(), default=0) <= most_of_one
                opened -= {m for op in step.slot if (m := arrival(table, op))}
            assert not opened


def test_an_early_message_is_received_before_its_turn_of_use():
    table = build("dualpipev", pp=3, num_micro_batches=6)
    orders = set()
    for rank in range(3):
        row = lower(table, rank)
        for source in range(3):
            posted = [m for s in row for m in s.post if m.source == source]
            arrivals = (arrival(table, op) for s in row for op in s.slot)
            orders.add(posted == [m for m in arrivals if m and m.source == source])
    assert orders == {True, False}


def test_a_pair_sends_its_activation_before_its_gradient():
    table = build("dualpipev", pp=3, num_micro_batches=6)
    pairs = [step for step in lower(table, 1) if len(step.slot) == 2]
    kinds = [tuple(message.kind for message in step.sends) for step in pairs]
    assert set(kinds) == {(Kind.F, Kind.B)}
