"""The picture shows simulated time and never cuts a cell."""

import re

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.draw import text
from pith.schedule.simulate import simulate


def test_a_small_picture_is_as_drawn_by_hand():
    lines = text(build("1f1b", pp=2, num_micro_batches=2)).splitlines()
    assert lines[0] == "1f1b: pp 2, stages 2, micro-batches 2; time 9, bubble 3 (F = I = W = 1)"
    assert lines[1] == "rank 0  F0 F1 .  .  B0--- .  B1---"
    assert lines[2] == "rank 1  .  F0 B0--- F1 B1--- .  ."
    assert "the number is the micro-batch" in lines[3]


def test_a_pair_and_the_second_stage_of_a_rank_can_be_told():
    lines = text(build("dualpipev", pp=1, num_micro_batches=2)).splitlines()
    assert lines[1] == "rank 0  F0 f0 F1 b0--- f1|B0--- b1--- I1 W1"
    assert "lower case the rank's second stage" in lines[2]


def drawn_rows(picture: str) -> list[str]:
    return [line for line in picture.splitlines() if re.match(r"rank \d", line)]


def cells(row: str) -> list[str]:
    """The slots of a drawn row."""
    return re.findall(r"[FBIWfbiw]\d+(?:\|[Bb]\d+)?", re.sub(r"^rank \d+", "", row))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [None, 1000, 80, 50, 1])
def test_what_is_shown_and_what_is_counted_make_the_whole_row(name, width):
    table = build(name, pp=3, num_micro_batches=12)
    picture = text(table, width=width)
    limit = max(map(len, picture.splitlines())) if width is None else max(width, 40)
    assert all(len(line) <= limit for line in picture.splitlines())
    rows = drawn_rows(picture)
    assert len(rows) == 3
    for row, slots in zip(rows, table.rows, strict=True):
        left_out = re.search(r"\+(\d+)$", row)
        assert len(cells(row)) + (int(left_out[1]) if left_out else 0) == len(slots)
        assert bool(left_out) == (limit < 100)


@pytest.mark.parametrize("name", SCHEDULES)
def test_columns_are_proportional_to_time(name):
    table = build(name, pp=3, num_micro_batches=12)
    plan = simulate(table)
    for row, spans in zip(drawn_rows(text(table)), plan.rows, strict=True):
        columns = [match.start() - len("rank 0  ") for match in re.finditer(r"(?<= )[A-Za-z]", row)]
        unit = columns[-1] // spans[-1].start
        assert columns == [span.start * unit for span in spans]
