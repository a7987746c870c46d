"""A timeline as one self-contained SVG: rows of numbered cells, live activations under each row.

Pixels are chosen so that micro-batch numbers are legible at 100 %: wide tables give wide pictures.
"""

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from pith.schedule.costs import Number
from pith.schedule.simulate import Span
from pith.schedule.table import Kind, slot_text
from pith.schedule.timeline import Timeline, number, stretch

# Of each kind the colour of a rank's first stage. Later ones are lighter, up to half white. All
# stay apart under protanopia, deuteranopia and tritanopia.
_COLOURS = {Kind.F: "#1d5fa8", Kind.B: "#cc5500", Kind.I: "#f0d000", Kind.W: "#009e73"}
_LIGHTEST = 0.5
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}
_STYLE = """svg{font:11px "Helvetica Neue",Arial,"Liberation Sans","DejaVu Sans",sans-serif}
text{fill:#57606a}.title{font-size:14px;font-weight:bold;fill:#1f2328}
.page{fill:#fff;stroke:#d0d7de}.idle{fill:#eaeef2}.tick{stroke:#d0d7de}.live{fill:#8c959f}
.end{text-anchor:end}.mid,.cells text{text-anchor:middle}"""

# Sizes in pixels.
_DIGIT = 0.64  # the width of a digit by its font size, in the widest of the common fonts
_LETTER = 5.4  # the width of a letter of the other text
_SMALLEST, _LARGEST = 9, 10  # font of the numbers
_EDGE = 2  # by what a slot is wider than its number: the gap to the next one, and air
_GAP, _DECIMAL = 1, 0.1  # between slots; to what coordinates are rounded
_ROOMY = 4  # cells get at most so many times the room that their numbers need,
_COMFORT = 820  # and no more than that where the picture would become wider than this
_WIDEST = 100_000  # no picture is wider, even if numbers then have no room
_LEFT, _TOP, _RIGHT, _BORDER = 60, 58, 88, 16  # around the cells; free space at the borders
_SWATCH = 12  # a box of the legend
_CELL, _STRIP, _ROW = 24, 10, 44  # heights: a cell, its strip of live activations, a row with both

_Box = tuple[tuple[str, int, int], ...]


def svg(*timelines: Timeline) -> str:
    """The picture: cells over time, an axis, live activations by the highest, and a legend.

    A pair is one cell, its forward above its backward. A slot that has no room for its number goes
    without; every slot has a tooltip with its text form, start and end. Several timelines, which
    must be in one unit, stand below each other on one scale.
    """
    assert len({timeline.unit for timeline in timelines}) == 1, "timelines in different units"
    scale = max(map(_pixels_per_unit, timelines))
    pictures, width, top = [], 0, 0
    for timeline in timelines:
        picture, right, bottom = _picture(timeline, scale=scale, top=top)
        pictures.append(picture)
        width, top = max(width, right), bottom
    if len(pictures) == 1:
        return pictures[0]
    return "".join((f"{_opening(width, top)}>\n", *pictures, "</svg>\n"))


def _picture(timeline: Timeline, *, scale: float, top: int) -> tuple[str, int, int]:
    """One timeline, `top` below the first: the text, its width and where it ends."""
    title, summary = _printable(timeline.title), escape(timeline.summary)
    bottom = _TOP + _ROW * len(timeline.rows) + 16  # of the axis
    width = max(_LEFT + timeline.makespan * scale + _RIGHT, 8 * len(title) + 2 * _BORDER, 560)
    legend, height = _legend(timeline, top=bottom + 12, width=width)
    width = math.ceil(width)
    place = f' y="{top}"' if top else ""
    lines = (
        f'{_opening(width, height)}{place} role="img" aria-label="{title}">',
        f"<style>\n{_STYLE}\n{_shades(timeline)}</style>",
        f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="{_BORDER}" y="26">{title}</text>',
        f'<text x="{_BORDER}" y="44">{summary}</text>',
        *_axis(timeline, scale=scale, bottom=bottom),
        *_ranks(timeline, scale),
        *legend,
        "</svg>\n",
    )
    return "\n".join(lines), width, top + height


def _opening(width: int, height: int) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}'


def _pixels_per_unit(timeline: Timeline) -> float:
    rounding = 2 * _DECIMAL
    least = stretch(timeline.rows, lambda s: _number_width(s) * _SMALLEST + _EDGE + rounding)
    least = min(least, _WIDEST / (timeline.makespan or 1))
    pixels = max(least, min(least * _ROOMY, _COMFORT / (timeline.makespan or 1)))
    return max(math.ceil(least), math.floor(pixels)) if pixels > _SMALLEST else pixels


def _font(timeline: Timeline, scale: float) -> float:
    """The largest font in which every number that fits in the smallest one still fits."""
    spans = (span for row in timeline.rows for span in row)
    fits = (((s.end - s.start) * scale - _EDGE) / _number_width(s) for s in spans)
    largest = min((font for font in fits if font >= _SMALLEST), default=_LARGEST)
    return math.floor(min(largest, _LARGEST) * 10) / 10


def _number_width(span: Span) -> float:
    """The width of the longest number of a slot, by its font size."""
    return _DIGIT * max(len(str(op.micro)) for op in span.slot)


def _ranks(timeline: Timeline, scale: float) -> Iterator[str]:
    """Of each rank its name, cells and live activations."""
    lives = [timeline.live(rank) for rank in range(len(timeline.rows))]
    peaks = [max((held for _, held in live), default=0) for live in lives]
    font, laps, end = _font(timeline, scale), _laps(timeline), timeline.makespan * scale
    for rank, row in enumerate(timeline.rows):
        yield f'<g transform="translate({_LEFT} {_TOP + _ROW * rank})">'
        yield f'<text class="end" x="-8" y="16">rank {rank}</text>'
        yield f'<g class="cells" font-size="{font}">'
        for span in row:
            tip = f"{timeline.say(span.start)} to {timeline.say(span.end)}"
            yield _slot(span, tip=tip, laps=laps[rank], scale=scale, font=font)
        yield "</g>"
        if (most := max(peaks)) > 0:
            yield f'<path class="live" d="{_outline(lives[rank], scale=scale, most=most)}"/>'
            yield f'<text x="{_px(end + 8)}" y="{_CELL + _STRIP}">peak {peaks[rank]:.4g}</text>'
        yield "</g>"


def _slot(span: Span, *, tip: str, laps: dict[int, int], scale: float, font: float) -> str:
    """One cell, of a pair two halves: coloured boxes with numbers, and a tooltip."""
    left, right = round(span.start * scale, 1), round(span.end * scale, 1)
    wide = max(right - left - (_GAP if right - left > 3 * _GAP else 0), 5 * _DECIMAL)
    high = _CELL / len(span.slot)
    has_number = _number_width(span) * font + _EDGE <= right - left
    drawn = f"<title>{slot_text(span.slot)}, {tip}</title>"
    for turn, op in enumerate(span.slot):
        box = f"M{_px(left)} {_px(turn * high)}v{_px(high)}h{_px(wide)}V{_px(turn * high)}"
        drawn += f'<path class="{op.kind}{laps[op.stage]}" d="{box}"/>'
        if has_number:
            base = round((turn + 0.5) * high + 0.36 * font)
            drawn += f'<text x="{_px(left + wide / 2)}" y="{base}">{op.micro}</text>'
    return f"<g>{drawn}</g>"


def _outline(live: tuple[tuple[Number, Number], ...], *, scale: float, most: Number) -> str:
    """The path around the activations held, `most` as high as the strip."""
    low = _CELL + 2 + _STRIP
    steps = (f"H{_px(time * scale)}V{_px(low - held / most * _STRIP)}" for time, held in live)
    return f"M0 {low}{''.join(steps)}V{low}z"


def _printable(text: str) -> str:
    """Text for an element or an attribute."""
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return escape(visible, {'"': "&quot;"})


def _px(value: float) -> str:
    """A coordinate, to one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _axis(timeline: Timeline, *, scale: float, bottom: float) -> Iterator[str]:
    """What the cells lie on: idle time of every rank, lines over it at round times."""
    length, (by, unit) = timeline.makespan * scale, timeline.scale
    tops = [_TOP + _ROW * rank for rank in range(len(timeline.rows))]
    boxes = "".join(f"M{_LEFT} {top}h{_px(length)}v{_CELL}h-{_px(length)}z" for top in tops)
    yield f'<path class="idle" d="{boxes}"/>'
    ticks = _round_times(timeline.makespan * by, most=max(2, int(length / 64)))
    places = [_px(_LEFT + tick / by * scale) for tick in ticks]
    lines = "".join(f"M{place} {_TOP - 4}V{bottom - 12}" for place in places)
    yield f'<path class="tick" d="{lines}"/>'
    yield f'<text class="end" x="{_LEFT - 8}" y="{bottom}">{unit or "time"}</text>'
    for place, tick in zip(places, ticks, strict=True):
        yield f'<text class="mid" x="{place}" y="{bottom}">{number(tick)}</text>'


def _round_times(end: Number, *, most: int) -> list[Number]:
    """At most `most` equal steps of 1, 2 or 5 times a power of ten, from zero up to `end`."""
    if not end:
        return [0]
    power = math.floor(math.log10(end / most))
    sizes = (digit * 10.0**exponent for exponent in (power, power + 1) for digit in (1, 2, 5))
    step = next(size for size in sizes if end / size <= most)
    return [turn * step for turn in range(int(end / step + 1e-9) + 1)]


def _laps(timeline: Timeline) -> list[dict[int, int]]:
    """For each rank which of its stages a stage is: the first is 0."""
    place, ranks = timeline.table.placement, range(len(timeline.rows))
    return [{stage: lap for lap, stage in enumerate(place.stages(rank))} for rank in ranks]


def _shades(timeline: Timeline) -> str:
    """The style of every kind and lap: its colour, and black or white for the number on it."""
    num_laps = max((len(laps) for laps in _laps(timeline)), default=1)
    style = ""
    for kind in Kind:
        for lap in range(num_laps):
            colour = _lighter(_COLOURS[kind], _LIGHTEST * lap / max(1, num_laps - 1))
            name = f".{kind}{lap}"
            style += f"{name}{{fill:{colour}}}{name}+text{{fill:{_ink(colour)}}}\n"
    return style


def _lighter(colour: str, white: float) -> str:
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _ink(colour: str) -> str:
    """Black or white, whichever has more contrast (WCAG 2.1, relative luminance)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    luminance = sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000" if luminance > 0.179 else "#fff"


def _legend(timeline: Timeline, *, top: float, width: float) -> tuple[list[str], int]:
    """The legend, below `top` and no wider than `width`, and the height of all that."""
    drawn, left, line = [], float(_BORDER), 0
    for boxes, text in _entries(timeline):
        room = _SWATCH * (len(boxes) + 1) + _LETTER * len(text)
        if left + room > width and left > _BORDER:
            left, line = float(_BORDER), line + 1
        swatches = "".join(
            f'<path class="{name}" d="M{_SWATCH * turn} {y}h{_SWATCH}v{high}h-{_SWATCH}z"/>'
            for turn, box in enumerate(boxes)
            for name, y, high in box
        )
        drawn.append(
            f'<g transform="translate({_px(left)} {top + 20 * line})">'
            f'<text x="{_SWATCH * len(boxes) + 5}" y="10">{text}</text>{swatches}</g>'
        )
        left += room + 8
    return drawn, int(top) + 20 * (line + 1) + 4


def _entries(timeline: Timeline) -> Iterator[tuple[list[_Box], str]]:
    """What the legend explains: boxes side by side, each of parts (class, top, height); a text."""
    slots = [span.slot for row in timeline.rows for span in row]
    kinds = {op.kind for slot in slots for op in slot}
    num_laps = max((len(laps) for laps in _laps(timeline)), default=1)
    for kind in (kind for kind in Kind if kind in kinds):
        yield [((f"{kind}{lap}", 0, _SWATCH),) for lap in range(num_laps)], _NAMES[kind]
    if num_laps > 1:
        yield [], "lighter: later stage"
    if any(len(slot) > 1 for slot in slots):
        half = _SWATCH // 2
        yield [(("F0", 0, half), (f"B{num_laps - 1}", half, half))], "pair, overlapped"
    yield [(("idle", 0, _SWATCH),)], "idle"
    yield [(("live", 4, _SWATCH - 4),)], "live activations"
