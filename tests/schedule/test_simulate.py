"""Simulated times against published formulas and against the longest path of the graph."""

import random
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest

from pith.errors import RunFailedError
from pith.schedule.build import SCHEDULES, build
from pith.schedule.costs import Costs, Number
from pith.schedule.simulate import Simulation, live, simulate
from pith.schedule.table import Kind, Op, Table, parse_rows

PPS = (2, 4, 8, 16)
UNEVEN = Costs(f=10, i=12, w=8)


@pytest.mark.parametrize(
    ("name", "bubbles"),
    [
        ("gpipe", [3, 9, 21, 45]),
        ("1f1b", [3, 9, 21, 45]),
        ("1f1b-pair", [3, 9, 21, 45]),
        ("interleaved", [3, 9, 21, 45]),  # of half a stage
        ("zb-h1", [1, 3, 7, 15]),
        ("zbv", [1, 3, 7, 15]),
        ("dualpipev", [2, 6, 14, 30]),
        ("dualpipe", [0, 2, 6, 14]),
    ],
)
def test_bubbles_are_the_published_ones(name, bubbles):
    tables = [build(name, pp=pp, num_micro_batches=4 * pp) for pp in PPS]
    assert [simulate(table).bubble for table in tables] == bubbles


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", 210),
        ("1f1b", 210),
        ("1f1b-pair", 210),
        ("interleaved", 210),  # of half a stage
        ("zb-h1", 98),
        ("zbv", 84),
        ("dualpipev", 172),
        ("dualpipe", 72),
    ],
)
def test_bubbles_at_uneven_costs_are_the_known_ones(name, bubble):
    table = build(name, pp=8, num_micro_batches=32)
    assert simulate(table, UNEVEN).bubble == bubble


@pytest.mark.parametrize("pp", PPS)
def test_zbv_never_idles_inside_a_ranks_own_span(pp):
    plan = simulate(build("zbv", pp=pp, num_micro_batches=4 * pp))
    assert own_span_idle(plan) == [0] * pp


def own_span_idle(plan: Simulation) -> list[Number]:
    """The time that each rank waits between its first slot and its last."""
    spans = [row[-1].end - row[0].start for row in plan.rows]
    return [span - work for span, work in zip(spans, plan.work, strict=True)]


def test_zbv_idles_inside_a_span_where_the_costs_are_uneven():
    plan = simulate(build("zbv", pp=8, num_micro_batches=32), UNEVEN)
    assert max(own_span_idle(plan)) == own_span_idle(plan)[0] == 56


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (10, 12, 8), (3, 5, 2)])
def test_1f1b_and_gpipe_wait_for_one_filling_and_one_draining(f, i, w):
    for name in ("gpipe", "1f1b"):
        table = build(name, pp=8, num_micro_batches=32)
        assert simulate(table, Costs(f=f, i=i, w=w)).bubble == 7 * (f + i + w)


@pytest.mark.parametrize(("name", "steps", "formula"), [("dualpipev", 7, 182), ("dualpipe", 3, 78)])
def test_the_dualpipe_formula_is_an_upper_bound_at_uneven_costs(name, steps, formula):
    f, i, w = 10, 12, 8
    assert steps * ((f + i + w) + (i + w) - 3 * w) == formula
    assert simulate(build(name, pp=8, num_micro_batches=32), Costs(f=f, i=i, w=w)).bubble < formula


@pytest.mark.parametrize("name", ["1f1b", "chimera", "dualpipe"])
def test_a_unit_of_as_many_micro_batches_as_ranks_takes_the_known_time(name):
    makespan = {"1f1b": 21, "chimera": 16, "dualpipe": 15}
    assert simulate(build(name, pp=4, num_micro_batches=4)).makespan == makespan[name]


@pytest.mark.parametrize("pp", PPS)
@pytest.mark.parametrize("num_units", [1, 2, 4])
def test_chimera_waits_once_at_even_costs_and_in_every_unit_when_backwards_are_longer(
    pp, num_units
):
    table = build("chimera", pp=pp, num_micro_batches=num_units * pp)
    assert simulate(table, Costs(f=2)).bubble == 2 * (pp - 2)
    assert simulate(table).bubble == (num_units + 1) * (pp - 2)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpipe", (16, 16, 16, 16)),
        ("1f1b", (4, 3, 2, 1)),
        ("1f1b-pair", (7, 5, 3, 1)),
        ("zb-h1", (4, 4, 4, 4)),
        # from here in half stages: 8 are 4 micro-batches of the rank's layers
        ("interleaved", (11, 9, 7, 5)),
        ("zbv", (8, 8, 8, 8)),
        ("dualpipev", (8, 8, 8, 9)),
    ],
)
def test_peak_live_activations_are_the_published_ones(name, stages):
    assert simulate(build(name, pp=4, num_micro_batches=16)).peak_live == stages


def test_activations_live_until_the_weight_gradient_and_a_pair_trades():
    (row,) = parse_rows(("F0.0 F1.0 I1.0 W1.0 F0.1|B0.0 B0.1",))
    assert live(row) == (1, 2, 2, 2, 1, 1)


def test_times_of_one_micro_batch_by_hand():
    table = build("1f1b", pp=2, num_micro_batches=1)
    plan = simulate(table, Costs(f=2, i=3, w=4, comm=5))
    times = [[(span.start, span.end) for span in row] for row in plan.rows]
    assert times == [[(0, 2), (21, 28)], [(7, 9), (9, 16)]]
    assert (plan.makespan, plan.work, plan.bubble) == (28, (9, 9), 19)


def test_a_pair_takes_the_sum_of_both():
    plan = simulate(build("1f1b-pair", pp=1, num_micro_batches=2), Costs(f=2, i=3, w=4))
    assert [(span.start, span.end) for span in plan.rows[0]] == [(0, 2), (2, 11), (11, 18)]


def graph(table: Table) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """For each slot (rank, position) the slots that must end first: from the definition alone."""
    at = {}
    for rank, row in enumerate(table.rows):
        for position, slot in enumerate(row):
            for op in slot:
                at[op] = (rank, position)
    last = table.placement.num_stages - 1

    def inputs(op: Op) -> list[Op]:
        if op.kind is Kind.F:
            return [Op(Kind.F, op.stage - 1, op.micro)] if op.stage else []
        if op.kind is Kind.W:
            return [Op(Kind.I, op.stage, op.micro)]
        own = [Op(Kind.F, op.stage, op.micro)]
        either = [Op(kind, op.stage + 1, op.micro) for kind in (Kind.B, Kind.I)]
        return (
            own
            if op.stage == last
            else own + [candidate for candidate in either if candidate in at]
        )

    return {
        (rank, position): {at[needed] for op in slot for needed in inputs(op)}
        | ({(rank, position - 1)} if position else set())
        for rank, row in enumerate(table.rows)
        for position, slot in enumerate(row)
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_the_longest_path(name):
    for pp, num_micro_batches, f, i, w, comm in [(3, 4, 2, 5, 3, 1), (4, 9, 7, 4, 6, 11)]:
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        cost = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: i + w}
        before, end = graph(table), {}
        for node in TopologicalSorter(before).static_order():
            rank, position = node
            ready = [end[n] + (comm if n[0] != rank else 0) for n in before[node]]
            end[node] = max(ready, default=0) + sum(
                cost[o.kind] for o in table.rows[rank][position]
            )
        plan = simulate(table, Costs(f=f, i=i, w=w, comm=comm))
        assert end == {
            (rank, position): span.end
            for rank, row in enumerate(plan.rows)
            for position, span in enumerate(row)
        }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_is_stuck_exactly_when_its_graph_has_a_cycle(name):
    chance = random.Random(name)
    verdicts = set()
    for _ in range(80):
        pp = chance.randint(1, 4)
        table = build(name, pp=pp, num_micro_batches=chance.randint(2, 6))
        rows = list(table.rows)
        rank = chance.randrange(pp)
        row = list(rows[rank])
        at = chance.randrange(len(row) - 1)
        to = min(at + chance.choice([1, 1, 2, 4]), len(row) - 1)
        row[at], row[to] = row[to], row[at]
        rows[rank] = tuple(row)
        shuffled = replace(table, rows=tuple(rows))
        assert is_stuck(shuffled) == has_cycle(shuffled)
        verdicts.add(is_stuck(shuffled))
    assert verdicts == {True, False}


def is_stuck(table: Table) -> bool:
    try:
        simulate(table)
    except RunFailedError:
        return True
    return False


def has_cycle(table: Table) -> bool:
    try:
        TopologicalSorter(graph(table)).prepare()
    except CycleError:
        return True
    return False


def test_a_deadlock_names_the_slot_and_what_it_waits_for():
    table = build("1f1b", pp=2, num_micro_batches=2)
    rows = parse_rows(("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"))
    with pytest.raises(RunFailedError, match=r"rank 0 stops at B0\.0, waiting for gradient 0\.0"):
        simulate(replace(table, rows=rows))
