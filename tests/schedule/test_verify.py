"""verify accepts every table that is built and rejects every broken one by name."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pith.errors import RunFailedError
from pith.schedule.build import SCHEDULES, build
from pith.schedule.lower import Step, arrival, lower
from pith.schedule.passes import forward_only
from pith.schedule.table import Op, Placement, Slot, Table, parse_rows
from pith.schedule.verify import INVARIANTS, Violation, check, verify, verify_steps

BROKEN = sorted((Path(__file__).parents[1] / "broken" / "schedule").glob("*.txt"))


def read_broken(path: Path) -> tuple[Table, int | None, Violation]:
    head, _, rows = path.read_text().partition("\n\n")
    field = dict(line.split(": ", 1) for line in head.splitlines())
    style, pp, num_stages = field["placement"].split()
    place = Placement(style, int(pp), int(num_stages))
    table = Table(path.stem, place, int(field["micro-batches"]), parse_rows(rows.splitlines()))
    invariant, rank, slot, found, wanted = field["rejects"].split(" | ")
    max_live = int(field["max-live"]) if "max-live" in field else None
    return table, max_live, Violation(invariant, int(rank), slot, found, wanted)


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_table_is_rejected_by_name(path):
    table, max_live, expected = read_broken(path)
    assert expected in verify(table, max_live=max_live)


def test_every_invariant_has_a_broken_table():
    assert {read_broken(path)[2].invariant for path in BROKEN} == set(INVARIANTS)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", range(1, 9))
def test_every_built_table_holds(name, pp):
    for num_micro_batches in {1, 2, pp, 2 * pp - 1, 2 * pp, 2 * pp + 3, 24}:
        assert verify(build(name, pp=pp, num_micro_batches=num_micro_batches)) == ()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", range(1, 9))
def test_every_evaluation_table_holds(name, pp):
    for num_micro_batches in (1, pp, 2 * pp + 3):
        table = forward_only(build(name, pp=pp, num_micro_batches=num_micro_batches))
        assert verify(table, forward_only=True) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_deep_pipelines_hold(name):
    for pp, num_micro_batches in [(9, 1), (11, 7), (13, 25), (16, 31), (16, 33)]:
        assert verify(build(name, pp=pp, num_micro_batches=num_micro_batches)) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_with_one_operation_changed_never_passes(name):
    chance = random.Random(name)
    for _ in range(30):
        pp = chance.randint(2, 4)
        table = build(name, pp=pp, num_micro_batches=chance.randint(1, 9))
        rank = chance.randrange(pp)
        at = chance.randrange(len(table.rows[rank]))
        slot = table.rows[rank][at]
        assert verify(with_slots(table, rank, at, slot[1:])), f"{slot[0]} dropped"
        assert verify(with_slots(table, rank, at, slot, slot)), f"{slot} twice"
        moved = with_slots(table, rank, at)
        assert verify(with_slots(moved, (rank + 1) % pp, 0, slot, table.rows[(rank + 1) % pp][0]))


def with_slots(table: Table, rank: int, at: int, *slots: Slot) -> Table:
    """`table` with `slots` in place of the slot `at` in the row of `rank`."""
    row = (*table.rows[rank][:at], *filter(None, slots), *table.rows[rank][at + 1 :])
    return replace(table, rows=(*table.rows[:rank], row, *table.rows[rank + 1 :]))


def test_receives_posted_in_the_order_of_use_are_rejected():
    table = build("dualpipev", pp=3, num_micro_batches=6)
    steps = tuple(lower(table, rank) for rank in range(3))
    assert verify_steps(table, steps) == ()

    def order_of_use(row: tuple[Step, ...]) -> tuple[Step, ...]:
        needs = [tuple(m for op in step.slot if (m := arrival(table, op))) for step in row]
        return tuple(replace(step, post=need) for step, need in zip(row, needs, strict=True))

    violations = verify_steps(table, tuple(order_of_use(row) for row in steps))
    assert {violation.invariant for violation in violations} == {"channels", "progress"}


def test_a_bound_that_just_fits_passes_and_one_less_does_not():
    table = build("1f1b", pp=4, num_micro_batches=8)
    assert verify(table, max_live=4) == ()
    assert [(v.invariant, v.rank, v.slot) for v in verify(table, max_live=3)] == [
        ("live", 0, "F0.3")
    ]


def test_a_training_table_is_no_evaluation_table_and_the_reverse():
    table = build("1f1b", pp=2, num_micro_batches=2)
    assert verify(table, forward_only=True)
    assert verify(forward_only(table))


def test_check_raises_one_fault_per_violation():
    check(build("zbv", pp=2, num_micro_batches=3))
    table, _, _ = read_broken(next(p for p in BROKEN if p.stem.startswith("progress-two")))
    with pytest.raises(RunFailedError, match=r"rank 0, B0\.0: waits for gradient 0\.0") as caught:
        check(table)
    assert len(caught.value.faults) == len(verify(table)) == 2


def test_an_empty_slot_is_rejected():
    table = Table("", Placement("loop", 1, 1), 1, (((), (Op.parse("F0.0"),), (Op.parse("B0.0"),)),))
    assert [violation.invariant for violation in verify(table)] == ["pairs"]
