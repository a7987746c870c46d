"""A timeline says when, how long and how much, for plans as the simulator does."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pith.schedule.build import build
from pith.schedule.costs import Costs
from pith.schedule.simulate import UNIT, Span, simulate
from pith.schedule.table import parse_slot
from pith.schedule.timeline import Timeline, stretch
from tests.schedule.timelines import planned

UNEVEN = Costs(f=1.3, i=0.7, w=0.45, comm=0.2, pair=0.9, activation=2.5, w_store=0.75, layers=3)
NAMES = ["gpipe", "1f1b", "1f1b-pair", "interleaved", "zb-h1", "zbv", "dualpipev", "dualpipe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", [UNIT, UNEVEN])
def test_a_plan_is_told_as_the_simulator_found_it(name, costs):
    simulation = simulate(build(name, pp=4, num_micro_batches=8), costs)
    timeline = Timeline.planned(simulation)
    assert timeline.rows == simulation.rows
    assert timeline.makespan == simulation.makespan
    assert timeline.bubble == pytest.approx(simulation.bubble)
    for rank, peak in enumerate(simulation.peak_live):
        live = timeline.live(rank)
        assert max(held for _, held in live) == pytest.approx(peak)
        assert live[0][0] == simulation.rows[rank][0].start
        assert live[-1] == (simulation.rows[rank][-1].end, 0)
        assert [time for time, _ in live] == sorted({time for time, _ in live})
        assert all(before[1] != after[1] for before, after in pairwise(live))


def test_activations_are_held_from_the_start_of_a_forward_to_the_end_of_what_frees_them():
    timeline = planned("1f1b", pp=2, num_micro_batches=2)  # rank 0  F0 F1 .  .  B0 .  B1
    assert timeline.live(0) == ((0, 1), (1, 2), (6, 1), (9, 0))
    split = planned("zb-h1", pp=1, num_micro_batches=1, costs=Costs(activation=5, w_store=2))
    assert split.live(0) == ((0, 5), (2, 2), (3, 0))  # F I W


def test_spans_that_overlap_by_their_clocks_are_cut_and_gaps_are_idle():
    rows = (tuple(Span(parse_slot(text), start, end) for text, start, end in MEASURED),)
    timeline = replace(
        planned("1f1b", pp=1, num_micro_batches=2), rows=rows, unit="s", measured=True
    )
    assert [(s.start, s.end) for s in timeline.rows[0]] == [
        (0, 0.010), (0.010, 0.030), (0.035, 0.045), (0.045, 0.045),
    ]  # fmt: skip
    assert timeline.bubble == pytest.approx(0.005)
    assert timeline.summary == "time 45 ms, bubble 5 ms (measured)"


MEASURED = [
    ("F0.0", -2e-6, 0.010),
    ("B0.0", 0.010 - 3e-7, 0.030),
    ("F0.1", 0.035, 0.045),
    ("B0.1", 0.0449, 0.0449),
]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.25, "2.25 s"), (0.5, "500 ms"), (1.25e-5, "12.5 us"), (0, "0 us")]
)
def test_seconds_are_told_in_the_unit_of_the_makespan(seconds, text):
    rows = ((Span(parse_slot("F0.0"), 0, seconds),),)
    timeline = replace(
        planned("gpipe", pp=1, num_micro_batches=1), rows=rows, unit="s", measured=True
    )
    assert timeline.say(timeline.makespan) == text


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (Costs(), "(F = I = W = 1)"),
        (Costs(f=10, i=12, w=8, pair=0.85), "(F = 10, I = 12, W = 8, pair 0.85)"),
        (Costs(f=(1, 3), i=(2, 2), comm=0.5), "(F = 1 to 3, I = 2, W = 1, messages 0.5)"),
    ],
)
def test_a_plan_says_what_its_unit_means(costs, text):
    assert planned("1f1b", pp=2, num_micro_batches=2, costs=costs).summary.endswith(text)


def test_the_shortest_span_gets_its_room_but_not_at_any_price():
    even = planned("1f1b", pp=2, num_micro_batches=4)
    assert stretch(even.rows, lambda _: 3) == 3
    uneven = planned("1f1b", pp=2, num_micro_batches=4, costs=Costs(f=1, i=5_000, w=5_000))
    assert stretch(uneven.rows, lambda _: 3) == pytest.approx(4 * 6 / 10_001)
    assert stretch(((),), lambda _: 3) == 1
