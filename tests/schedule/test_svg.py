"""The picture shows every slot at its time, legibly, and needs nothing but itself."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from pith.schedule.build import SCHEDULES, build
from pith.schedule.costs import Costs
from pith.schedule.simulate import simulate
from pith.schedule.svg import svg
from pith.schedule.table import Placement, Table, parse_rows, slot_text
from pith.schedule.timeline import Timeline
from tests.schedule.timelines import measured, planned

NS = "{http://www.w3.org/2000/svg}"
UNEVEN = Costs(f=(1.13, 1, 0.97, 2.31), i=(1.2, 1.1, 1.05, 2.4), w=(0.8, 0.7, 0.75, 2.1), comm=0.15)
WIDEST_DIGIT = 0.64  # of its font size, in DejaVu Sans and Verdana; Arial has 0.56


def by_hand(*rows: str, placement: Placement) -> Timeline:
    return Timeline.planned(simulate(Table("by hand", placement, 2, parse_rows(rows))))


class Drawn:
    """What a picture holds, read from its XML alone."""

    def __init__(self, text: str) -> None:
        self.root = ET.fromstring(text)
        self.width, self.height = (float(self.root.attrib[side]) for side in ("width", "height"))
        self.style = self.root.find(f"{NS}style").text
        self.ranks = [g for g in self.root.findall(f"{NS}g") if g.find(f"{NS}g") is not None]
        self.fills = dict(re.findall(r"\.(\w+)\{fill:(#\w+)", self.style))
        self.inks = dict(re.findall(r"\.(\w+)\+text\{fill:(#\w+)", self.style))

    def slots(self, rank: int) -> list[ET.Element]:
        return self.ranks[rank].findall(f"{NS}g/{NS}g")

    def font(self, rank: int) -> float:
        return float(self.ranks[rank].find(f"{NS}g").attrib["font-size"])


def boxes(slot: ET.Element) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of the boxes of a slot."""
    form = re.compile(r"M([\d.]+) ([\d.]+)v([\d.]+)h([\d.]+)V\2")
    matches = [form.fullmatch(path.attrib["d"]) for path in slot.findall(f"{NS}path")]
    numbers = [[float(part) for part in match.groups()] for match in matches]
    return [(x, y, width, height) for x, y, height, width in numbers]


def tooltip(slot: ET.Element) -> str:
    return slot.find(f"{NS}title").text


TIMELINES = [
    planned("1f1b", pp=4, num_micro_batches=8),
    planned("zbv", pp=4, num_micro_batches=8),
    planned("dualpipev", pp=4, num_micro_batches=10),
    planned("dualpipe", pp=4, num_micro_batches=8),
    planned("1f1b-pair", pp=2, num_micro_batches=6, costs=Costs(f=10, i=12, w=8, pair=0.85)),
    planned("1f1b", pp=4, num_micro_batches=8, costs=UNEVEN),
    planned("gpipe", pp=1, num_micro_batches=1),
    measured(planned("dualpipev", pp=4, num_micro_batches=10)),
    measured(planned("zb-h1", pp=3, num_micro_batches=12)),
    by_hand(
        "F0.0 F0.1 F2.0 F2.1 F4.0 F4.1 F6.0 F6.1 B6.0 B6.1 B4.0 B4.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 F3.1 F5.0 F5.1 F7.0 B7.0 F7.1 B7.1 B5.0 B5.1 B3.0 B3.1 B1.0 B1.1",
        placement=Placement("loop", 2, 8),
    ),
]


@pytest.mark.parametrize("timeline", TIMELINES, ids=lambda t: f"{t.title} {t.unit}")
def test_every_slot_is_a_cell_at_its_time_in_the_colour_of_its_kind_and_stage(timeline):
    drawn = Drawn(svg(timeline))
    scale = max(
        x + w for r in range(len(timeline.rows)) for s in drawn.slots(r) for x, _, w, _ in boxes(s)
    )
    scale = (scale + 1) / timeline.makespan
    for rank, row in enumerate(timeline.rows):
        own = timeline.table.placement.stages(rank)
        assert len(drawn.slots(rank)) == len(row)
        for slot, span in zip(drawn.slots(rank), row, strict=True):
            assert tooltip(slot).startswith(
                f"{slot_text(span.slot)}, {timeline.say(span.start)} to"
            )
            assert [text.text for text in slot.findall(f"{NS}text")] == [
                str(op.micro) for op in span.slot
            ]
            classes = [path.attrib["class"] for path in slot.findall(f"{NS}path")]
            assert classes == [f"{op.kind}{own.index(op.stage)}" for op in span.slot]
            assert set(classes) <= set(drawn.fills)
            for x, _, width, _ in boxes(slot):
                assert x == pytest.approx(span.start * scale, abs=0.3)
                assert x + width + 1 == pytest.approx(span.end * scale, abs=0.3)


def test_a_pair_is_one_cell_with_the_forward_above_the_backward():
    drawn = Drawn(svg(planned("1f1b-pair", pp=2, num_micro_batches=4)))
    pair = next(slot for slot in drawn.slots(1) if "|" in tooltip(slot))
    assert [path.attrib["class"] for path in pair.findall(f"{NS}path")] == ["F0", "B0"]
    (x, top, width, height), (x_below, top_below, width_below, _) = boxes(pair)
    assert (x, width) == (x_below, width_below)
    assert top_below == top + height == 12


@pytest.mark.parametrize(
    "timeline",
    [
        *(planned(name, pp=8, num_micro_batches=32) for name in ("dualpipev", "zbv", "1f1b")),
        *TIMELINES,
    ],
    ids=lambda t: f"{t.title} {t.unit}",
)
def test_every_number_is_legible_at_100_percent(timeline):
    text = svg(timeline)
    assert len(text) < 200_000
    drawn = Drawn(text)
    for rank, row in enumerate(timeline.rows):
        font = drawn.font(rank)
        assert font >= 8
        for slot, span in zip(drawn.slots(rank), row, strict=True):
            numbers = slot.findall(f"{NS}text")
            assert len(numbers) == len(boxes(slot)) == len(span.slot)
            for (x, y, width, height), number in zip(boxes(slot), numbers, strict=True):
                half = WIDEST_DIGIT * font * len(number.text) / 2
                centre, base = float(number.attrib["x"]), float(number.attrib["y"])
                assert x <= centre - half
                assert centre + half <= x + width
                assert y <= base - 0.75 * font
                assert base <= y + height


@pytest.mark.parametrize("name", SCHEDULES)
def test_small_tables_fit_a_page(name):
    for timeline in (planned(name, pp=pp, num_micro_batches=m) for pp, m in ((2, 4), (4, 8))):
        for drawn in (timeline, measured(timeline)):
            assert Drawn(svg(drawn)).width <= 1000


def test_activations_are_drawn_up_to_the_peak_that_the_simulator_found():
    simulation = simulate(build("zb-h1", pp=4, num_micro_batches=8), Costs(w_store=0.5))
    drawn = Drawn(svg(Timeline.planned(simulation)))
    most = max(simulation.peak_live)
    for rank, peak in zip(drawn.ranks, simulation.peak_live, strict=True):
        (outline,) = (p for p in rank.findall(f"{NS}path") if p.attrib["class"] == "live")
        heights = [36 - float(y) for y in re.findall(r"V([\d.]+)", outline.attrib["d"])]
        assert max(heights) == pytest.approx(10 * peak / most, abs=0.06)
        assert heights[-1] == heights[-2] == 0
        assert rank.findall(f"{NS}text")[-1].text == f"peak {peak:g}"


def test_the_axis_has_round_times_in_the_unit_of_the_timeline():
    plan = planned("1f1b", pp=4, num_micro_batches=8)
    for timeline, unit, step in ((plan, "time", 5), (measured(plan), "ms", 20)):
        drawn = Drawn(svg(timeline))
        texts = drawn.root.findall(f"{NS}text")
        words = [text.text for text in texts]
        assert words[:2] == [timeline.title, timeline.summary]
        assert words[2] == unit
        last = int(timeline.makespan * timeline.scale[0] // step) * step
        assert words[3:] == [str(tick) for tick in range(0, last + 1, step)]
        ((x, _, width, _),) = boxes(drawn.slots(0)[-1])  # ends with the timeline, but for its gap
        end = (x + width + 1) * last / timeline.scale[0] / timeline.makespan
        assert float(texts[-1].attrib["x"]) - float(texts[3].attrib["x"]) == pytest.approx(
            end, abs=1
        )


def test_the_legend_names_what_is_drawn():
    def words(timeline: Timeline) -> set[str]:
        groups = Drawn(svg(timeline)).root.findall(f"{NS}g")
        return {g.find(f"{NS}text").text for g in groups if g.find(f"{NS}g") is None}

    assert words(planned("1f1b", pp=2, num_micro_batches=2)) == {
        "forward", "backward", "idle", "live activations",
    }  # fmt: skip
    assert words(planned("dualpipev", pp=4, num_micro_batches=8)) == {
        "forward", "backward", "input gradient", "weight gradient", "lighter: later stage",
        "pair, overlapped", "idle", "live activations",
    }  # fmt: skip


@pytest.mark.parametrize("timeline", TIMELINES, ids=lambda t: f"{t.title} {t.unit}")
def test_a_picture_needs_nothing_from_elsewhere_and_numbers_are_short(timeline):
    text = svg(timeline)
    assert text.count("http") == 1  # the namespace
    assert not re.search(r"<script|<image|<foreignObject|@import|@font-face|url\(|href", text)
    assert not re.search(r"\d\.\d\d", re.sub(r"<title>.*?</title>|<text.*?</text>", "", text))
    page = ET.fromstring(text).find(f"{NS}rect")
    assert page.attrib["class"] == "page"
    assert ".page{fill:#fff" in text


def test_a_picture_is_the_same_in_every_process():
    program = (
        "from pith.schedule.dualpipev import dualpipev\n"
        "from pith.schedule.simulate import simulate\n"
        "from pith.schedule.svg import svg\n"
        "from pith.schedule.timeline import Timeline\n"
        "print(svg(Timeline.planned(simulate(dualpipev(2, num_micro_batches=4)))), end='')"
    )
    here = svg(planned("dualpipev", pp=2, num_micro_batches=4))
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, check=True
        )
        assert done.stdout.decode() == here


def linear(colour: str) -> list[float]:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]


def test_numbers_contrast_with_their_cells():
    drawn = Drawn(svg(TIMELINES[-1]))
    light = {"#000": 0.0, "#fff": 1.0}
    assert set(drawn.inks) == {f"{kind}{lap}" for kind in "FBIW" for lap in range(4)}
    for name, ink in drawn.inks.items():
        weights = zip((0.2126, 0.7152, 0.0722), linear(drawn.fills[name]), strict=True)
        low, high = sorted([sum(w * part for w, part in weights), light[ink]])
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.1, AA


# Machado, Oliveira and Fernandes 2009: what a colour looks like without one kind of cones.
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def lab(rgb: list[float]) -> list[float]:
    """CIE 1976 L*a*b* of a linear sRGB colour."""
    r, g, b = (min(1, max(0, part)) for part in rgb)
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]


@pytest.mark.parametrize("eye", EYES)
def test_kinds_and_stages_can_be_told_apart_by_every_eye(eye):
    fills = Drawn(svg(planned("dualpipev", pp=4, num_micro_batches=8))).fills
    names = [f"{kind}{lap}" for kind in "FBIW" for lap in range(2)] + ["idle"]
    colours = [linear(fills[name]) for name in names]
    seen = [
        lab([sum(w * part for w, part in zip(row, colour, strict=True)) for row in EYES[eye]])
        for colour in colours
    ]
    distances = {
        pair: sum((a - b) ** 2 for a, b in zip(*both, strict=True)) ** 0.5
        for pair, both in zip(
            itertools.combinations(names, 2), itertools.combinations(seen, 2), strict=True
        )
    }
    assert min(distances.values()) > 12, min(distances, key=distances.get)


def test_a_title_may_hold_anything():
    title = 'a <b> & "c" \' \x01\n</svg> – µ'
    root = ET.fromstring(svg(replace(TIMELINES[0], title=title)))
    shown = title.replace("\x01", " ").replace("\n", " ")
    assert root.find(f"{NS}text").text == root.attrib["aria-label"] == shown


def test_slots_without_room_are_seen_but_have_no_number():
    costs = Costs(f=1, i=5_000, w=5_000)
    drawn = Drawn(svg(planned("1f1b", pp=2, num_micro_batches=3, costs=costs)))
    assert drawn.width <= 1000
    for rank in (0, 1):
        for slot in drawn.slots(rank):
            is_short = tooltip(slot).startswith("F")
            assert bool(slot.findall(f"{NS}text")) != is_short
            assert boxes(slot)[0][2] == 0.5 if is_short else boxes(slot)[0][2] > 100


def test_nothing_and_slots_without_length_are_drawn():
    empty = replace(TIMELINES[0], rows=((),) * 4)
    assert [len(Drawn(svg(empty)).slots(rank)) for rank in range(4)] == [0] * 4
    still = Drawn(svg(planned("zbv", pp=2, num_micro_batches=2, costs=Costs(f=0, i=0, w=0))))
    assert [len(still.slots(rank)) for rank in range(2)] == [12, 12]
    assert Drawn(svg(planned("zbv", pp=2, num_micro_batches=2, costs=Costs(w=0)))).width < 1000
