"""A trace holds the timeline, and is what readers of Chrome's trace event format accept.

The rules checked are those of the format ("Trace Event Format", Chromium) and of how Perfetto reads
it: slices of a thread must not overlap, a flow event binds to the slice that is open at its ts.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from pith.schedule.build import SCHEDULES
from pith.schedule.chrome import trace_events
from pith.schedule.costs import Costs
from pith.schedule.simulate import Span
from pith.schedule.table import parse_slot, slot_text
from pith.schedule.timeline import Timeline
from tests.schedule.timelines import UNIT_S, measured, planned

Event = dict[str, Any]
REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "tid", "ts", "args"},
}
FLOAT_COSTS = Costs(f=1.13, i=0.7, w=0.31, comm=0.15, pair=0.9, activation=1.7, w_store=0.3)


def read(*timelines: Timeline) -> list[Event]:
    return checked(trace_events(timelines))


def checked(trace: dict[str, Any]) -> list[Event]:
    """The events of a trace after a round trip through JSON, every rule of the format checked."""
    text = json.dumps(trace, allow_nan=False)
    assert json.loads(text) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = json.loads(text)["traceEvents"]
    for event in events:
        assert event.keys() >= REQUIRED[event["ph"]]
        assert min(event.get("ts", 0), event.get("dur", 0)) >= 0
    names = Counter((e["tid"], e["name"]) for e in events if e["ph"] == "M")
    assert not [name for name, times in names.items() if times > 1]
    require_threads(events)
    require_flows(events)
    return events


def require_threads(events: list[Event]) -> None:
    """Each thread is of one process, in order of time, and its slices do not overlap."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            threads[event["tid"]].append(event)
    for thread in threads.values():
        assert len({event["pid"] for event in thread}) == 1
        assert [event["ts"] for event in thread] == sorted(event["ts"] for event in thread)
        end = 0
        for event in thread:
            if event["ph"] == "X":
                assert event["ts"] >= end
                end = event["ts"] + event["dur"]


def require_flows(events: list[Event]) -> None:
    """A flow has one start and one later end on another thread, each inside a slice before it."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == sum(event["ph"] == "s" for event in events)
    assert len(ends) == sum(event["ph"] == "f" for event in events)
    assert starts.keys() == ends.keys()
    for start, end in ((starts[key], ends[key]) for key in starts):
        assert (start["name"], start["cat"], start["pid"]) == (end["name"], end["cat"], end["pid"])
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
    slices: dict[int, Event] = {}
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]] = event
        elif event["ph"] in "sf":
            bound = slices[event["tid"]]
            assert bound["ts"] <= event["ts"] < bound["ts"] + bound["dur"]
            event["slice"] = bound["name"]


def of_kind(events: list[Event], ph: str) -> list[Event]:
    return [event for event in events if event["ph"] == ph]


def flows(events: list[Event]) -> Counter[tuple[str, str]]:
    """The slices that each flow joins."""
    starts = {event["id"]: event["slice"] for event in of_kind(events, "s")}
    return Counter((starts[event["id"]], event["slice"]) for event in of_kind(events, "f"))


@pytest.mark.parametrize("name", [*SCHEDULES, "dualpipe"])
@pytest.mark.parametrize("costs", [Costs(), FLOAT_COSTS])
def test_every_slot_is_a_slice_and_every_message_between_ranks_a_flow(name, costs):
    plan = planned(name, pp=4, num_micro_batches=8, costs=costs)
    for timeline, us in ((plan, 1000), (measured(plan), 1e6)):
        events = read(timeline)
        slices = iter(of_kind(events, "X"))
        by_rank = defaultdict(list)
        for piece in slices:
            by_rank[piece["tid"]].append(piece)
        for row, (_, pieces) in zip(timeline.rows, sorted(by_rank.items()), strict=True):
            assert [piece["name"] for piece in pieces] == [slot_text(span.slot) for span in row]
            for piece, span in zip(pieces, row, strict=True):
                assert piece["ts"] == pytest.approx(span.start * us, abs=0.01)
                assert piece["dur"] == pytest.approx((span.end - span.start) * us, abs=0.02)
        assert flows(events) == hand_overs(plan)


def hand_overs(timeline: Timeline) -> Counter[tuple[str, str]]:
    """By the placement alone: the slots that compute neighbouring stages on different ranks."""
    table = timeline.table
    place, last = table.placement, table.placement.num_stages - 1
    slot_of = {
        (op.kind in "BI", op.stage, op.micro): slot_text(span.slot)
        for row in timeline.rows
        for span in row
        for op in span.slot
        if op.kind != "W"
    }
    return Counter(
        (slot_of[backward, stage, micro], slot_of[backward, stage + step, micro])
        for backward, step in ((False, 1), (True, -1))
        for stage in range(last + 1)
        for micro in range(table.num_micro_batches)
        if 0 <= stage + step <= last and place.rank(stage, micro) != place.rank(stage + step, micro)
    )


def test_a_small_trace_is_as_written_by_hand():
    events = read(planned("1f1b", pp=2, num_micro_batches=1))
    assert [(e["name"], e["args"]) for e in of_kind(events, "M")] == [
        ("process_name", {"name": "planned 1f1b: pp 2, stages 2, micro-batches 1"}),
        (
            "process_labels",
            {"labels": "time 6, bubble 3 (F = I = W = 1); a time unit is drawn as 1000 us"},
        ),
        ("process_sort_index", {"sort_index": 1}),
        ("thread_name", {"name": "rank 0"}),
        ("thread_sort_index", {"sort_index": 0}),
        ("thread_name", {"name": "rank 1"}),
        ("thread_sort_index", {"sort_index": 1}),
    ]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in of_kind(events, "X")] == [
        ("F0.0", "F", 0, 1000),
        ("F1.0", "F", 1000, 1000),
        ("B1.0", "B", 2000, 2000),
        ("B0.0", "B", 4000, 2000),
    ]
    assert of_kind(events, "X")[1]["args"] == {"kind": "F", "stage": 1, "micro": 0}
    assert [(e["name"], e["ts"], *e["args"].items()) for e in of_kind(events, "C")] == [
        ("rank 0", 0, ("live activations", 1)),
        ("rank 1", 1000, ("live activations", 1)),
        ("rank 1", 4000, ("live activations", 0)),
        ("rank 0", 6000, ("live activations", 0)),
    ]
    assert [e["name"] for e in of_kind(events, "s")] == [
        "activation 1.0 from rank 0 to 1",
        "gradient 0.0 from rank 1 to 0",
    ]


def test_a_pair_is_one_slice_that_tells_both_operations():
    events = read(planned("1f1b-pair", pp=1, num_micro_batches=2))
    pair = next(event for event in of_kind(events, "X") if "|" in event["name"])
    assert (pair["name"], pair["cat"]) == ("F0.1|B0.0", "F,B")
    assert pair["args"] == {
        "forward": {"kind": "F", "stage": 0, "micro": 1},
        "backward": {"kind": "B", "stage": 0, "micro": 0},
    }


def test_several_timelines_stand_side_by_side_from_zero():
    plan = planned("dualpipev", pp=2, num_micro_batches=4)
    events = read(plan, measured(plan), plan)
    names = [e["args"]["name"] for e in of_kind(events, "M") if e["name"] == "process_name"]
    assert names == [f"{origin} {plan.title}" for origin in ("planned", "measured", "planned")]
    first = {}
    for event in of_kind(events, "X"):
        first.setdefault(event["pid"], event["ts"])
    assert len(first) == 3
    assert max(first.values()) <= 200
    ids = [event["id"] for event in of_kind(events, "s")]
    assert len(set(ids)) == len(ids) == 3 * hand_overs(plan).total()
    assert len({event["tid"] for event in events}) == 6


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_counters_return_to_zero(name):
    for timeline in (
        plan := planned(name, pp=4, num_micro_batches=8, costs=FLOAT_COSTS),
        measured(plan),
    ):
        last = {e["name"]: e["args"]["live activations"] for e in of_kind(read(timeline), "C")}
        assert last == {f"rank {rank}": 0 for rank in range(4)}


def test_clocks_apart_lose_only_the_arrows_that_would_point_back():
    plan = planned("1f1b", pp=4, num_micro_batches=8)
    for units in (0.1, 0.9, -0.9, 40, -40):
        found = flows(read(measured(plan, shift=units * UNIT_S)))
        assert found <= hand_overs(plan)
        assert (found == hand_overs(plan)) == (abs(units) < 1)


def test_what_takes_no_time_has_no_arrow_and_what_never_ran_is_missing():
    assert (
        flows(read(planned("1f1b", pp=2, num_micro_batches=2, costs=Costs(f=0, i=0, w=0))))
        == Counter()
    )
    plan = planned("1f1b", pp=2, num_micro_batches=2)
    for cut in (1, 2, 5):
        rows = (plan.rows[0], plan.rows[1][:-cut])
        assert len(of_kind(read(replace(plan, rows=rows)), "X")) == 8 - min(cut, 4)
    assert of_kind(read(replace(plan, rows=((), ()))), "X") == []
    assert read() == []


def test_lengths_may_differ_widely_and_times_need_not_be_exact():
    slots = ("F0.0", "B0.0", "F0.1", "B0.1")
    times = (0, 1e-7, 0.1 + 0.2, 1 / 3, 1e4)
    row = tuple(Span(parse_slot(s), a, b) for s, a, b in zip(slots, times, times[1:], strict=False))
    plan = replace(planned("1f1b", pp=1, num_micro_batches=2), rows=(row,))
    assert len(of_kind(read(plan, replace(plan, unit="s", measured=True)), "X")) == 8
    read(planned("1f1b", pp=2, num_micro_batches=4, costs=Costs(f=1e-4, i=1, w=0.3333)))


@pytest.mark.parametrize(
    "broken",
    [
        lambda events: events[7].update(dur=5000),
        lambda events: events[7].pop("cat"),
        lambda events: events.append(of_kind(events, "s")[0] | {"id": 99}),
        lambda events: of_kind(events, "f")[0].update(ts=9e9),
        lambda events: of_kind(events, "f")[0].update(tid=of_kind(events, "s")[0]["tid"]),
        lambda events: of_kind(events, "f")[0].pop("bp"),
    ],
)
def test_the_rules_reject_a_broken_trace(broken):
    trace = trace_events([planned("1f1b", pp=2, num_micro_batches=2)])
    broken(trace["traceEvents"])
    with pytest.raises(AssertionError):
        checked(trace)
