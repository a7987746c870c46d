"""Passes keep what they should, in order."""

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.passes import forward_only, take_micro_batches
from pith.schedule.table import Kind, Placement, Table, parse_rows
from pith.schedule.verify import verify


def test_a_pair_that_loses_a_member_becomes_a_single_slot():
    rows = parse_rows(("F0.0 F0.1|B0.0 F0.2|B0.1 B0.2",))
    table = Table("by hand", Placement("loop", 1, 1), 3, rows)
    taken = take_micro_batches(table, 2)
    assert taken.row_texts() == ("F0.0 F0.1|B0.0 B0.1",)
    assert taken.num_micro_batches == 2
    assert take_micro_batches(table, 1).row_texts() == ("F0.0 B0.0",)
    assert forward_only(table).row_texts() == ("F0.0 F0.1 F0.2",)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_of_micro_batches_can_be_taken(name):
    table = build(name, pp=3, num_micro_batches=9)
    assert take_micro_batches(table, 9) == table
    for num_micro_batches in range(1, 9):
        assert verify(take_micro_batches(table, num_micro_batches)) == ()


@pytest.mark.parametrize("num_micro_batches", [0, 4])
def test_taking_none_or_more_than_there_are_is_a_mistake(num_micro_batches):
    with pytest.raises(AssertionError):
        take_micro_batches(build("gpipe", pp=2, num_micro_batches=3), num_micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_only_keeps_each_forward_in_its_order(name):
    table = build(name, pp=3, num_micro_batches=5)
    for before, after in zip(table.rows, forward_only(table).rows, strict=True):
        forwards = [op for slot in before for op in slot if op.kind is Kind.F]
        assert [(op,) for op in forwards] == list(after)
