"""Passes keep what they should, in order."""

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.costs import Costs
from pith.schedule.passes import forward_only, pair, split_w, take_micro_batches
from pith.schedule.simulate import simulate
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


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (10, 12, 8)])
@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16])
def test_1f1b_with_its_weight_gradients_split_off_is_zb_h1(pp, f, i, w):
    costs = Costs(f=f, i=i, w=w)
    for count in (1, pp, 4 * pp, 4 * pp + 1):
        split = split_w(build("1f1b", pp=pp, num_micro_batches=count), costs=costs, max_live=pp)
        known = simulate(build("zb-h1", pp=pp, num_micro_batches=count), costs)
        found = simulate(split, costs)
        assert found.makespan == known.makespan
        assert max(found.peak_live) == max(known.peak_live) == min(pp, count)
        assert verify(split, max_live=pp) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_splitting_keeps_a_table_valid_within_its_own_bound_and_whole_backwards_no_slower(name):
    for pp, count, costs in [
        (1, 3, Costs()),
        (3, 7, Costs(f=3, i=2, w=4)),
        (4, 5, Costs(comm=2)),
        (4, 9, Costs(w=0)),
    ]:
        table = build(name, pp=pp, num_micro_batches=count)
        split = split_w(table, costs=costs)
        before, after = simulate(table, costs), simulate(split, costs)
        assert verify(split, costs=costs, max_live=max(before.peak_live)) == ()
        if all(op.kind in "FB" for row in table.rows for slot in row for op in slot):
            assert after.makespan <= before.makespan
        alone = [slot for row in split.rows for slot in row if len(slot) == 1]
        assert Kind.B not in {op.kind for slot in alone for op in slot}


GAIN = Costs(f=10, i=12, w=8, pair=0.85)


def test_pairing_repairs_the_first_pair_of_dualpipev_on_one_rank():
    table = build("dualpipev", pp=1, num_micro_batches=4)
    paired = pair(table, costs=GAIN)
    assert "F0.1|B1.0" in paired.row_texts()[0]
    assert verify(paired) == ()
    assert simulate(paired, GAIN).makespan < simulate(table, GAIN).makespan


def test_what_pairs_would_make_slower_comes_back_unchanged():
    slower = build("zbv", pp=4, num_micro_batches=8)
    assert pair(slower, costs=GAIN) == slower
    for name in SCHEDULES:
        table = build(name, pp=3, num_micro_batches=7)
        assert pair(table, costs=Costs()) == table, "without a gain nothing is joined"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_pairing_keeps_a_table_valid_and_makes_none_slower_or_fuller(name, pp):
    for count in (1, 4, 4 * pp):
        table = build(name, pp=pp, num_micro_batches=count)
        paired = pair(table, costs=GAIN)
        before, after = simulate(table, GAIN), simulate(paired, GAIN)
        assert verify(paired, max_live=max(before.peak_live)) == ()
        assert after.makespan <= before.makespan
