"""One order of all messages, kept at both ends of each."""

import pytest

from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build
from pith.schedule.lower import Message, arrival, departure, lower_rows
from pith.schedule.mirror import lower_mirrored
from pith.schedule.simulate import simulate
from pith.schedule.table import Table, slot_text

EVERY = (*SCHEDULES, *SIMULATION_ONLY)
SIZES = [(2, 2), (2, 8), (4, 2), (4, 6), (4, 16), (6, 14), (8, 16)]


def test_a_small_1f1b_is_mirrored_as_by_hand():
    rows = lower_mirrored(build("1f1b", pp=2, num_micro_batches=2))
    words = [
        " ".join(
            word
            for step in row
            for word in (
                *(f"<{m.kind}{m.stage}.{m.micro}" for m in step.post),
                slot_text(step.slot),
                *(f">{m.kind}{m.stage}.{m.micro}" for m in step.sends),
            )
        )
        for row in rows
    ]
    # F0.1 and F1.0 end at once, by time 2; the lower rank's message comes first.
    assert words == [
        "F0.0 >F1.0 F0.1 >F1.1 <B0.0 B0.0 <B0.1 B0.1",
        "<F1.0 <F1.1 F1.0 B1.0 >B0.0 F1.1 B1.1 >B0.1",
    ]


def in_sending_order(table: Table) -> list[Message]:
    """All messages by the end of the slot that sends in a simulated run, then by rank."""
    sent = sorted(
        (span.end, rank, turn, number, message)
        for rank, row in enumerate(simulate(table).rows)
        for turn, span in enumerate(row)
        for number, op in enumerate(span.slot)
        if (message := departure(table, op))
    )
    return [message for *_, message in sent]


@pytest.mark.parametrize("name", EVERY)
def test_every_rank_holds_its_part_of_one_order(name):
    for pp, num_micro_batches in SIZES:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        order = in_sending_order(table)
        assert len(order) == len(set(order))
        for rank, row in enumerate(lower_mirrored(table)):
            lane = [m for step in row for m in (*step.post, *step.sends)]
            assert lane == [m for m in order if rank in (m.source, m.target)]
            assert [step.slot for step in row] == list(table.rows[rank])


@pytest.mark.parametrize("name", EVERY)
def test_only_the_receives_move(name):
    table = build(name, pp=4, num_micro_batches=10)
    for row, mirrored in zip(lower_rows(table), lower_mirrored(table), strict=True):
        assert [step.sends for step in row] == [step.sends for step in mirrored]
        posts = [{m for step in steps for m in step.post} for steps in (row, mirrored)]
        assert posts[0] == posts[1]


def most_open(table: Table) -> int:
    """The most receives that a rank has posted and not used."""
    most = 0
    for row in lower_mirrored(table):
        num_open = 0
        for step in row:
            num_open += len(step.post)
            most = max(most, num_open)
            num_open -= sum(arrival(table, op) is not None for op in step.slot)
        assert num_open == 0
    return most


@pytest.mark.parametrize(
    ("name", "most"),
    [("gpipe", 2), ("1f1b", 2), ("1f1b-pair", 3), ("zb-h1", 2), ("zbv", 3), ("dualpipev", 4)],
)
def test_few_receives_are_open(name, most):
    tables = [build(name, pp=pp, num_micro_batches=m) for pp in (4, 8, 16) for m in (6, 2 * pp, 35)]
    assert max(map(most_open, tables)) == most


def test_interleaved_holds_many_receives_open_where_rounds_are_uneven():
    assert most_open(build("interleaved", pp=16, num_micro_batches=32)) == 6
    assert most_open(build("interleaved", pp=16, num_micro_batches=31)) == 21


def test_a_table_that_cannot_end_has_no_mirrored_order():
    table = build("1f1b", pp=2, num_micro_batches=2)
    stuck = Table("stuck", table.placement, 2, (table.rows[0][::-1], table.rows[1]))
    with pytest.raises(AssertionError, match="stuck cannot end"):
        lower_mirrored(stuck)
