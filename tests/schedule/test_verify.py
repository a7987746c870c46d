"""verify accepts every table that is built, and rejects every broken one by name."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pith.errors import RequestError, RunFailedError
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build
from pith.schedule.costs import Costs
from pith.schedule.lower import Message, Step, arrival, lower_rows
from pith.schedule.passes import forward_only
from pith.schedule.simulate import simulate
from pith.schedule.table import Kind, Op, Placement, Slot, Style, Table, parse_rows, parse_slot
from pith.schedule.verify import (
    INVARIANTS,
    Violation,
    check,
    verify,
    verify_executed,
    verify_lanes,
    verify_steps,
)

FOLDER = Path(__file__).parents[1] / "broken"
BROKEN = sorted((FOLDER / "schedule").glob("*.txt"))
TRACES = sorted((FOLDER / "trace").glob("*.txt"))
EVERY = (*SCHEDULES, *SIMULATION_ONLY)


def build_even(name: str, *, pp: int, num_micro_batches: int) -> Table:
    """`build`, with the next even numbers where a schedule feeds both ends."""
    if name in SIMULATION_ONLY:
        pp, num_micro_batches = pp + pp % 2, num_micro_batches + num_micro_batches % 2
    return build(name, pp=pp, num_micro_batches=num_micro_batches)


def read_broken(path: Path) -> tuple[dict[str, str], Table, list[str]]:
    """The fields of a broken file, its table without communication, and its rows as written."""
    head, _, rows = path.read_text().partition("\n\n")
    field = dict(line.split(": ", 1) for line in head.splitlines())
    style, pp, num_stages = field["placement"].split()
    num_micro_batches = int(field["micro-batches"])
    fed = num_micro_batches if style == "bidirectional" else 0
    place = Placement(style, int(pp), int(num_stages), fed)
    slots = (
        " ".join(word for word in row.split() if word[0] not in "<>") for row in rows.splitlines()
    )
    table = Table(path.stem, place, num_micro_batches, parse_rows(tuple(slots)))
    return field, table, rows.splitlines()


def read_steps(table: Table, rows: list[str]) -> tuple[tuple[Step, ...], ...]:
    """Rows with communication: <F1.0 posts a receive of what F1.0 reads, >F1.0 sends it."""
    steps = []
    for row in rows:
        read: list[tuple[Slot, list[Message], list[Message]]] = []
        post: list[Message] = []
        for word in row.split():
            if word[0] in "<>":
                message = arrival(table, Op.parse(word[1:]))
                assert message
                (post if word[0] == "<" else read[-1][2]).append(message)
            else:
                read.append((parse_slot(word), post, []))
                post = []
        steps.append(tuple(Step(slot, tuple(p), tuple(sends)) for slot, p, sends in read))
    return tuple(steps)


def violations_of(path: Path) -> tuple[Violation, ...]:
    """What verify finds in a broken file: a table, or rows with communication and their lanes."""
    field, table, rows = read_broken(path)
    if "lane" not in field:
        bound = int(field["max-live"]) if "max-live" in field else None
        return verify(table, max_live=bound, costs=Costs.parse(field.get("costs", "")))
    steps, lane = read_steps(table, rows), field["lane"]
    if lane == "direction":
        return verify_steps(table, steps)
    return verify_lanes(table, steps, lane=lane)


def rejects(line: str) -> Violation:
    invariant, rank, slot, found, wanted = line.split(" | ")
    return Violation(invariant, int(rank), slot, found, wanted)


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_table_is_rejected_by_name(path):
    field, _, _ = read_broken(path)
    assert rejects(field["rejects"]) in violations_of(path)
    assert path.stem.startswith(rejects(field["rejects"]).invariant)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_wrong_execution_is_rejected_on_every_rank_that_strayed(path):
    head, _, rows = path.read_text().partition("\n\n")
    *expected, (_, request) = [line.split(": ", 1) for line in head.splitlines()]
    name, pp, num_micro_batches = request.split()
    table = build(name, pp=int(pp), num_micro_batches=int(num_micro_batches))
    executed = [row.split() for row in rows.splitlines()]
    assert verify_executed(table, executed) == tuple(rejects(line) for _, line in expected)
    assert expected


def test_every_invariant_has_a_broken_input():
    invariants = {read_broken(path)[0]["rejects"].split(" | ")[0] for path in BROKEN}
    assert invariants == set(INVARIANTS) - {"executed"}
    assert len(TRACES) > 10


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("pp", range(1, 7))
def test_every_built_table_holds(name, pp):
    for num_micro_batches in sorted({1, 2, pp, 2 * pp - 1, 2 * pp, 2 * pp + 3}):
        assert verify(build_even(name, pp=pp, num_micro_batches=num_micro_batches)) == ()


@pytest.mark.parametrize("name", EVERY)
def test_deep_pipelines_hold(name):
    for pp, num_micro_batches in [(8, 24), (9, 1), (11, 7), (13, 25), (16, 31), (16, 33)]:
        assert verify(build_even(name, pp=pp, num_micro_batches=num_micro_batches)) == ()


@pytest.mark.parametrize("virtual", [1, 3, 4])
def test_any_number_of_stages_a_rank_holds(virtual):
    for pp, num_micro_batches in [(1, 3), (2, 1), (3, 7), (5, 4), (8, 17), (16, 31)]:
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        assert verify(build("interleaved", virtual=virtual, **size)) == ()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_every_evaluation_table_holds(name, pp):
    for num_micro_batches in (1, pp, 2 * pp + 3):
        table = forward_only(build(name, pp=pp, num_micro_batches=num_micro_batches))
        assert verify(table, forward_only=True) == ()


@pytest.mark.parametrize("name", EVERY)
def test_a_table_with_one_operation_changed_never_passes(name):
    chance = random.Random(name)
    for _ in range(20):
        table = build_even(name, pp=chance.randint(2, 4), num_micro_batches=chance.randint(1, 9))
        pp = table.placement.pp
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
    steps = lower_rows(table)
    assert verify_steps(table, steps) == ()

    def order_of_use(row: tuple[Step, ...]) -> tuple[Step, ...]:
        needs = [tuple(m for op in step.slot if (m := arrival(table, op))) for step in row]
        return tuple(replace(step, post=need) for step, need in zip(row, needs, strict=True))

    violations = verify_steps(table, tuple(order_of_use(row) for row in steps))
    assert {violation.invariant for violation in violations} == {"channels", "progress"}


def test_a_table_whose_mirrored_order_stops_is_rejected(monkeypatch):
    table = build("1f1b", pp=2, num_micro_batches=4)
    assert verify(table) == ()
    monkeypatch.setattr("pith.schedule.verify.mirrored", lambda steps, *, times: steps)
    assert {violation.invariant for violation in verify(table)} == {"lanes"}


def test_a_bound_that_just_fits_passes_and_one_less_does_not():
    table = build("1f1b", pp=4, num_micro_batches=8)
    assert verify(table, max_live=4) == ()
    assert [(v.invariant, v.rank, v.slot) for v in verify(table, max_live=3)] == [
        ("live", 0, "F0.3")
    ]


@pytest.mark.parametrize("name", EVERY)
def test_a_bound_in_other_units_is_that_of_the_simulation(name):
    table = build_even(name, pp=4, num_micro_batches=9)
    stages = range(table.placement.num_stages)
    costs = Costs(
        activation=tuple(5 + stage % 3 for stage in stages),
        w_store=2,
        layers=tuple(stages),
    )
    peak = max(simulate(table, costs).peak_live)
    assert verify(table, max_live=peak, costs=costs) == ()
    assert {v.invariant for v in verify(table, max_live=peak - 1, costs=costs)} == {"live"}


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(RequestError, match="3 values"):
        verify(build("1f1b", pp=2, num_micro_batches=2), costs=Costs(activation=(1, 2, 3)))


def test_a_training_table_is_no_evaluation_table_and_the_reverse():
    table = build("1f1b", pp=2, num_micro_batches=2)
    assert verify(table, forward_only=True)
    assert verify(forward_only(table))


def test_check_raises_one_fault_per_violation():
    check(build("zbv", pp=2, num_micro_batches=3))
    _, table, _ = read_broken(next(p for p in BROKEN if p.stem.startswith("progress-two")))
    with pytest.raises(RunFailedError, match=r"rank 0, B0\.0: waits for gradient 0\.0") as caught:
        check(table)
    assert len(caught.value.faults) == len(verify(table)) == 2


def test_an_empty_slot_is_rejected():
    table = Table("", Placement("loop", 1, 1), 1, (((), (Op.parse("F0.0"),), (Op.parse("B0.0"),)),))
    assert [violation.invariant for violation in verify(table, max_live=1)] == ["pairs"]


NUMBERS = st.integers(-2, 5)
OPS = st.builds(Op, st.sampled_from(Kind), NUMBERS, NUMBERS)
ROWS = st.lists(st.lists(st.lists(OPS, max_size=3).map(tuple), max_size=6).map(tuple), max_size=4)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, style=st.sampled_from(get_args(Style)), numbers=st.tuples(*[NUMBERS] * 4))
def test_any_operations_at_all_get_a_verdict(rows, style, numbers):
    pp, num_stages, fed, num_micro_batches = numbers
    for place in (Placement(style, pp, num_stages, fed), Placement(style, len(rows), 2, fed)):
        table = Table("any", place, num_micro_batches, tuple(rows))
        for forwards in (False, True):
            violations = verify(table, max_live=1, forward_only=forwards)
            assert {violation.invariant for violation in violations} <= set(INVARIANTS)
            assert violations or is_whole(table, forwards=forwards)


def is_whole(table: Table, *, forwards: bool) -> bool:
    """Whether there is something to do and its operations are all there, each once."""
    ops = [op for row in table.rows for slot in row for op in slot]
    place = table.placement
    kinds = [(Kind.F,)] if forwards else [(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)]
    cells = [(s, m) for s in range(place.num_stages) for m in range(table.num_micro_batches)]
    whole = [any({Op(k, *cell) for k in ks} <= set(ops) for ks in kinds) for cell in cells]
    return bool(cells) and all(whole) and len(ops) == len(set(ops))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(EVERY))
def test_any_change_of_a_good_table_gets_a_verdict(data, name):
    table = build_even(name, pp=data.draw(st.integers(1, 4)), num_micro_batches=4)
    slots = st.lists(st.lists(OPS, max_size=3).map(tuple), max_size=2)
    rank = data.draw(st.integers(0, table.placement.pp - 1))
    at = data.draw(st.integers(0, len(table.rows[rank]) - 1))
    row = (*table.rows[rank][:at], *data.draw(slots), *table.rows[rank][at + 1 :])
    changed = replace(table, rows=(*table.rows[:rank], row, *table.rows[rank + 1 :]))
    costs = Costs(activation=tuple(range(table.placement.num_stages)), layers=3)
    violations = verify(changed, max_live=100, costs=costs)
    assert not violations if changed == table else violations or is_whole(changed, forwards=False)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(EVERY))
def test_what_ran_is_accepted_exactly_when_it_is_the_table(data, name):
    table = build_even(name, pp=data.draw(st.integers(1, 3)), num_micro_batches=3)
    planned = [text.split() for text in table.row_texts()]
    assert verify_executed(table, planned) == ()
    assert verify_executed(table, [*planned, []])
    executed = [list(row) for row in planned]
    row = executed[data.draw(st.integers(0, len(executed) - 1))]
    start = data.draw(st.integers(0, len(row)))
    end = data.draw(st.integers(start, len(row)))
    texts = st.one_of(OPS.map(str), st.sampled_from(sorted(set(row))), st.text(max_size=4))
    row[start:end] = data.draw(st.lists(texts, max_size=3))
    violations = verify_executed(table, executed)
    strayed = [rank for rank, row in enumerate(planned) if row != executed[rank]]
    assert [violation.rank for violation in violations] == strayed
    for violation in violations:
        position = int(violation.slot.split()[1].rstrip(","))
        assert executed[violation.rank][:position] == planned[violation.rank][:position]
        assert executed[violation.rank][position:][:1] != planned[violation.rank][position:][:1]


def num_calls(work: Callable[[], object]) -> int:
    """How many functions `work` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", EVERY)
def test_work_grows_as_the_table_does_and_no_slot_costs_much(name):
    """Counted, as seconds are the machine's: those of 16 ranks stand in docs/performance.md."""
    tables = [build_even(name, pp=4, num_micro_batches=m) for m in (20, 40)]
    small, large = (num_calls(lambda t=table: (verify(t), simulate(t))) for table in tables)
    assert large < 2.2 * small
    assert large < 450 * sum(len(row) for row in tables[1].rows)
