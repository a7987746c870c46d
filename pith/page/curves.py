"""Curves over steps: drawn with letters for a terminal, and as SVG for a page.

A series is one value a step; None, and what is not finite, is a gap.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape

Series = Sequence[float | None]

MARKS = "+x"  # of the first curve and the second
BOTH = "*"
_LABEL = 11  # columns of the numbers at the left
_WIDTH, _HEIGHT = 720, 260  # pixels of a picture
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 44
_NUM_TICKS = 5


def text_plot(curves: Mapping[str, Series], *, width: int = 78, height: int = 12) -> str:
    """Up to two curves in one plot of `width` columns, and below it which mark is which.

    A cell that several steps share shows each curve that passes through it.
    """
    assert 1 <= len(curves) <= len(MARKS), f"{len(curves)} curves"
    values = [value for series in curves.values() for value in _known(series)]
    if not values:
        return "no finite value to draw"
    low, high = min(values), max(values)
    columns = width - _LABEL - 2
    num_steps = max(len(series) for series in curves.values())
    cells = [[" "] * columns for _ in range(height)]
    for mark, series in zip(MARKS, curves.values(), strict=False):
        for index, value in enumerate(series):
            if value is not None and math.isfinite(value):
                row = round((1 - _share(value, low, high)) * (height - 1))
                column = round(_share(index, 0, num_steps - 1) * (columns - 1))
                cells[row][column] = mark if cells[row][column] in (" ", mark) else BOTH
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    lines = [f"{labels.get(n, ''):>{_LABEL}} |{''.join(row)}" for n, row in enumerate(cells)]
    ends = f"1{num_steps:>{columns - 1}}" if num_steps > 1 else "1"
    room = columns // len(curves) - 7
    named = "  ".join(f"{mark} {name[:room]}" for mark, name in zip(MARKS, curves, strict=False))
    legend = f"{named}  {BOTH} both" if len(curves) > 1 else named
    frame = [f"{'':>{_LABEL}} +{'-' * columns}", f"{'':>{_LABEL}}  {ends}"]
    rows = [*lines, *frame, f"{'':>{_LABEL}}  {legend}"]
    return "\n".join(row.rstrip()[:width] for row in rows)


def svg_plot(curves: Mapping[str, Series], *, title: str, unit: str = "") -> str:
    """The curves as one SVG with axes, a legend and a tooltip a curve; steps count from 1.

    Colours are classes (curve0, curve1, axis, tick), which the page's style knows.
    """
    values = [value for series in curves.values() for value in _known(series)]
    opening = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">'
    )
    if not values:
        return f'{opening}<text x="{_LEFT}" y="{_HEIGHT // 2}">no finite value</text></svg>'
    low, high = _padded(min(values), max(values))
    num_steps = max(len(series) for series in curves.values())
    drawn = [
        _polyline(series, name, number=n, bounds=(low, high), num_steps=num_steps)
        for n, (name, series) in enumerate(curves.items())
    ]
    ticks = _ticks(low, high, num_steps=num_steps)
    return "\n".join((opening, *ticks, *drawn, *_legend(list(curves), unit=unit), "</svg>"))


def _known(series: Series) -> Iterator[float]:
    return (value for value in series if value is not None and math.isfinite(value))


def _share(value: float, low: float, high: float) -> float:
    """Where `value` stands between `low` and `high`, from 0 to 1; halves cannot overflow."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5


def _padded(low: float, high: float) -> tuple[float, float]:
    """Bounds with some air, but none below zero where no value is; equal values in the middle."""
    air = (high / 2 - low / 2) * 0.1 or abs(high) * 0.05 or 1.0
    most = sys.float_info.max
    return max(low - air, 0.0 if low >= 0 else -most), min(high + air, most)


def _place(index: float, value: float, *, bounds: tuple[float, float], num_steps: int) -> str:
    x = _LEFT + _share(index, 0, num_steps - 1) * (_WIDTH - _LEFT - _RIGHT)
    y = _TOP + (1 - _share(value, *bounds)) * (_HEIGHT - _TOP - _BOTTOM)
    return f"{x:.1f} {y:.1f}"


def _polyline(
    series: Series, name: str, *, number: int, bounds: tuple[float, float], num_steps: int
) -> str:
    """One curve: a line through neighbouring values, a dot where a value stands alone."""
    path, is_open = [], False
    for index, value in enumerate(series):
        if value is None or not math.isfinite(value):
            is_open = False
            continue
        place = _place(index, value, bounds=bounds, num_steps=num_steps)
        path.append(f"L{place}" if is_open else f"M{place}h.01")
        is_open = True
    drawn = "".join(path)
    return f'<path class="curve{number}" d="{drawn}"><title>{escape(name)}</title></path>'


def _ticks(low: float, high: float, *, num_steps: int) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    for n in range(_NUM_TICKS):
        share = n / (_NUM_TICKS - 1)
        y = _TOP + (1 - share) * (bottom - _TOP)
        value = low * (1 - share) + high * share
        yield f'<path class="tick" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:.4g}</text>'
    for step in sorted({1 + round(n / (_NUM_TICKS - 1) * (num_steps - 1)) for n in range(5)}):
        x = _LEFT + _share(step - 1, 0, num_steps - 1) * (right - _LEFT)
        yield f'<text class="middle" x="{x:.1f}" y="{bottom + 16}">{step}</text>'


def _legend(names: Sequence[str], *, unit: str) -> Iterator[str]:
    y, x = _HEIGHT - 8, float(_LEFT)
    for number, name in enumerate(names):
        yield f'<path class="curve{number}" d="M{x:.0f} {y - 4}h22"/>'
        yield f'<text x="{x + 28:.0f}" y="{y}">{escape(name)}</text>'
        x += 44 + 7 * len(name)
    yield f'<text class="end" x="{_WIDTH - _RIGHT}" y="{y}">{escape(unit or "step")}</text>'
