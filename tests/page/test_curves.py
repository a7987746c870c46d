"""Curves in letters and as SVG: every value where it belongs, gaps where there is none."""

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pith.page.curves import svg_plot, text_plot

SERIES = st.lists(st.one_of(st.none(), st.floats()), max_size=30)


def test_two_curves_are_drawn_with_two_marks_between_their_bounds() -> None:
    plot = text_plot({"first": [4.0, 2.0, 0.0], "second": [4.0, 4.0, 4.0]}, width=44, height=3)

    assert plot.splitlines() == [
        "          4 |*              x              x",
        "            |               +",
        "          0 |                              +",
        "            +-------------------------------",
        "             1                             3",
        "             + first  x second  * both",
    ]


def test_a_gap_is_no_value() -> None:
    plot = text_plot({"loss": [1.0, None, math.nan, math.inf, 2.0]}, height=4)

    assert sum(line.split("|")[-1].count("+") for line in plot.splitlines()[:4]) == 2
    assert plot.splitlines()[0].strip().startswith("2 |")
    assert plot.splitlines()[3].strip().startswith("1 |")


@settings(deadline=None)
@given(first=SERIES, second=SERIES)
@example(first=[1.79e308, -1.79e308], second=[5e-324])
@example(first=[3.0] * 500, second=[])
def test_any_series_gives_a_plot_of_80_columns_and_a_whole_svg(
    first: list[float | None], second: list[float | None]
) -> None:
    curves = {"a run with <a name>": first, "b & c": second}

    assert max(map(len, text_plot(curves).splitlines())) <= 80
    drawn = svg_plot(curves, title='a "title" & <more>')
    root = ET.fromstring(drawn)
    assert root.attrib["aria-label"] == 'a "title" & <more>'
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("no finite value", "")


def test_every_finite_value_is_a_point_of_its_curve() -> None:
    root = ET.fromstring(svg_plot({"a": [1.0, 2.0, None, 4.0], "b": [1.0] * 4}, title="t"))
    paths = {
        c: [p.attrib["d"] for p in root.iter("path") if p.get("class") == c]
        for c in ("curve0", "curve1")
    }

    assert paths["curve0"][0].count("M") == 2, "the gap parts the curve"
    assert paths["curve0"][0].count("L") == 1
    assert paths["curve1"][0].count("L") == 3
    heights = [
        float(part.split()[1].split("h")[0])
        for part in paths["curve0"][0].replace("L", "M").split("M")[1:]
    ]
    assert heights == sorted(heights, reverse=True), "larger values are higher up"
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.2)


def test_nothing_finite_is_said_so() -> None:
    assert text_plot({"a": [None, math.nan], "b": []}) == "no finite value to draw"
    assert "no finite value" in svg_plot({"a": []}, title="t")
