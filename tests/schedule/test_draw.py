"""The picture shows time, planned or measured, and never cuts a cell."""

import re
from dataclasses import replace

import pytest

from pith.schedule.build import SCHEDULES
from pith.schedule.costs import Costs
from pith.schedule.draw import text
from tests.schedule.timelines import measured, planned


def test_a_small_picture_is_as_drawn_by_hand():
    lines = text(planned("1f1b", pp=2, num_micro_batches=2)).splitlines()
    assert lines[0] == "1f1b: pp 2, stages 2, micro-batches 2; time 9, bubble 3 (F = I = W = 1)"
    assert lines[1] == "rank 0  F0 F1 .  .  B0--- .  B1---"
    assert lines[2] == "rank 1  .  F0 B0--- F1 B1--- .  ."
    assert "the number is the micro-batch" in lines[3]


def test_a_pair_and_the_second_stage_of_a_rank_can_be_told():
    lines = text(planned("dualpipev", pp=1, num_micro_batches=2)).splitlines()
    assert lines[1] == "rank 0  F0 f0 F1 b0--- f1|B0--- b1--- I1 W1"
    assert "lower case the rank's second stage" in lines[2]


def test_times_that_are_not_whole_are_drawn_in_proportion():
    costs = Costs(f=1, i=0.75, w=0.75)  # four columns a unit: F0, a space and one for rounding
    lines = text(planned("1f1b", pp=2, num_micro_batches=2, costs=costs)).splitlines()
    assert lines[0].endswith("; time 7.5, bubble 2.5 (F = 1, I = 0.75, W = 0.75)")
    assert lines[1] == "rank 0  F0- F1- .  .  B0--- .   B1---"
    assert lines[2] == "rank 1  .   F0- B0--- F1- B1--- .  ."


def test_a_measured_picture_says_seconds():
    seen = text(measured(planned("1f1b", pp=2, num_micro_batches=2))).splitlines()
    assert re.search(r"; time 63\.\d+ ms, bubble 2[01]\.\d+ ms \(measured\)$", seen[0])
    assert re.fullmatch(r"rank 0  F0-+ F1-+ [. ]+ B0-+ [. ]+ B1-+", seen[1])


def drawn_rows(picture: str) -> list[str]:
    return [line for line in picture.splitlines() if re.match(r"rank \d", line)]


def cells(row: str) -> list[str]:
    """The slots of a drawn row."""
    return re.findall(r"[FBIWfbiw]\d+(?:\.\d+)?(?:\|[Bb]\d+)?", re.sub(r"^rank \d+", "", row))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [None, 1000, 80, 50, 1])
def test_what_is_shown_and_what_is_counted_make_the_whole_row(name, width):
    timeline = planned(name, pp=3, num_micro_batches=12)
    for drawn in (timeline, measured(timeline)):
        picture = text(drawn, width=width)
        limit = max(map(len, picture.splitlines())) if width is None else max(width, 40)
        assert all(len(line) <= limit for line in picture.splitlines())
        rows = drawn_rows(picture)
        assert len(rows) == 3
        for row, slots in zip(rows, timeline.rows, strict=True):
            left_out = re.search(r"\+(\d+)$", row)
            assert len(cells(row)) + (int(left_out[1]) if left_out else 0) == len(slots)
            assert bool(left_out) == (limit < 100)


@pytest.mark.parametrize("name", SCHEDULES)
def test_columns_are_proportional_to_time(name):
    timeline = planned(name, pp=3, num_micro_batches=12)
    for row, spans in zip(drawn_rows(text(timeline)), timeline.rows, strict=True):
        unit = starts(row)[-1] // spans[-1].start
        assert starts(row) == [span.start * unit for span in spans]
    timeline = measured(timeline)
    for row, spans in zip(drawn_rows(text(timeline)), timeline.rows, strict=True):
        unit = starts(row)[-1] / spans[-1].start
        assert starts(row) == pytest.approx([span.start * unit for span in spans], abs=1)


def starts(row: str) -> list[int]:
    """The first column of each label."""
    return [match.start() - len("rank 0  ") for match in re.finditer(r"(?<= )[A-Za-z]", row)]


@pytest.mark.parametrize("width", [None, 400, 100])
def test_a_label_without_room_is_replaced_never_cut(width):
    costs = Costs(f=(1.5, 0.2, 0.01, 20), i=(1, 1, 0.2, 60), w=1)
    timeline = planned("1f1b", pp=4, num_micro_batches=24, costs=costs)
    picture = text(timeline, width=width)
    assert "# no room for the label" in " ".join(picture.split())
    for row, spans in zip(drawn_rows(picture), timeline.rows, strict=True):
        labels = iter([f"{span.slot[0].kind}{span.slot[0].micro}" for span in spans])
        assert all(cell in labels for cell in cells(row))  # in this order, none invented
    assert re.search(r"rank 3  \.  F0-{20,} (B0-{20,})?", picture)


def test_slots_too_short_for_a_column_are_counted():
    costs = Costs(f=1, i=5_000, w=5_000)
    rows = drawn_rows(text(planned("1f1b", pp=2, num_micro_batches=3, costs=costs)))
    assert [cells(row) for row in rows] == [["B0", "B1", "B2"]] * 2
    assert [row[-2:] for row in rows] == ["+3"] * 2
    no_weights = planned("zbv", pp=2, num_micro_batches=4, costs=Costs(w=0))
    for width, counted in ((None, ["+8", "+8"]), (65, ["+8", "+8"]), (64, ["+9", "+8"])):
        rows = drawn_rows(text(no_weights, width=width))
        assert max(map(len, rows)) <= (width or 65)
        assert [row[-2:] for row in rows] == counted


def test_nothing_to_draw_is_drawn():
    timeline = planned("1f1b", pp=2, num_micro_batches=1)
    empty = replace(timeline, rows=((), ()))
    assert text(empty, width=80).splitlines()[1:3] == ["rank 0", "rank 1"]
    still = text(planned("1f1b", pp=1, num_micro_batches=1, costs=Costs(f=0, i=0, w=0)), width=40)
    assert "rank 0  +2" in still.splitlines()
