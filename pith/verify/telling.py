"""A comparison in words, as a plot of letters, and as a page."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pith.page.curves import Series, svg_plot, text_plot
from pith.page.html import Section, listing, page, paragraph, table
from pith.report import Check
from pith.verify.compare import Comparison, ratio_text, recipe_differences
from pith.verify.difference import Difference
from pith.verify.steps import finite_number

SHOWN = ("loss", "grad_norm")
HEADS = ("step", "loss A", "loss B", "apart", "grad norm A", "grad norm B", "apart")
_NUM_WORST = 5


def text(comparison: Comparison) -> str:
    """What came of it, the first and the worst steps, and both losses in one plot."""
    return "\n".join(_lines(comparison))


def html(comparison: Comparison, checks: tuple[Check, ...]) -> str:
    """One self-contained page; `checks` are all that were made of the comparison."""
    failed = sum(not check.ok for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"{len(checks)} checks held"
    a, b = comparison.a, comparison.b
    rows = [("held" if c.ok else "FAILED", c.name, c.found, c.wanted, c.where) for c in checks]
    changed = recipe_differences(a, b).items()
    return page(
        f"{a.path.name} and {b.path.name}: {verdict}",
        (
            Section("Summary", listing(list(_summary(comparison)))),
            *_pictures(comparison),
            Section("Checks", table(("", "check", "found", "wanted", "where"), rows)),
            Section("Steps", table(HEADS, _rows(comparison))),
            Section("Recipe", _pairs((name, *pair) for name, pair in changed)),
            Section("Environment", _pairs(_environments(comparison))),
        ),
    )


def _lines(comparison: Comparison) -> Iterator[str]:
    yield from _summary(comparison)
    yield ""
    for row in (HEADS, *_rows(comparison)):
        yield "{:>6}{:>12}{:>12}{:>9}{:>13}{:>13}{:>9}".format(*row)
    for quantity in SHOWN:
        yield f"\n{quantity}"
        yield text_plot(_curves(comparison, quantity))
    yield ""


def _summary(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.a, comparison.b
    yield f"A          {a.path}, {len(a.steps)} steps of {a.num_steps}"
    yield f"B          {b.path}, {len(b.steps)} steps of {b.num_steps}"
    yield f"tolerance  {comparison.tolerance.name} ({'; '.join(comparison.why)})"
    first, unequal = comparison.first_difference, comparison.first_unequal
    yield f"beyond it  {_told(first)}"
    if unequal != first:
        yield f"unequal    {_told(unequal)}"
    speed, memory = ratio_text(comparison.speed_ratio), ratio_text(comparison.memory_ratio)
    yield f"B by A     {speed} tokens per second, {memory} peak memory"
    weights = comparison.weights
    if weights is None:
        yield "weights    left out: final tensors were not compared"
    elif weights.worst is not None:
        figure = weights.relative[weights.worst]
        yield f"weights    at most {figure:.1e} apart, {weights.worst}; from {weights.first} on"
    changed = recipe_differences(a, b)
    for name, (mine, its) in list(changed.items())[:_NUM_WORST]:
        yield f"recipe     {name}: {mine} against {its}"
    if len(changed) > _NUM_WORST:
        yield f"recipe     and {len(changed) - _NUM_WORST} more"


def _told(difference: Difference | None) -> str:
    return f"{difference.quantity} of {difference}" if difference else "nothing"


def _told_steps(comparison: Comparison) -> list[int]:
    """The first step and the last, and the worst of each shown quantity between them."""
    both = sorted(comparison.a.by_step.keys() & comparison.b.by_step.keys())
    told = {*both[:1], *both[-1:]}
    for quantity in SHOWN:
        worst = sorted(comparison.of(quantity), key=lambda d: (-d.relative, d.step))
        told |= {d.step for d in worst[:_NUM_WORST]}
    return sorted(told)


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """A row for each told step: both values of each shown quantity, and how far apart."""
    apart = {(d.step, d.quantity): d for d in comparison.differences}
    for step in _told_steps(comparison):
        cells = [str(step)]
        for quantity in SHOWN:
            difference = apart[step, quantity]
            cells += [_figure(difference.a), _figure(difference.b), f"{difference.relative:.1e}"]
        yield tuple(cells)


def _figure(value: object) -> str:
    number = finite_number(value)
    return f"{number:.7g}" if number is not None else f"{json.dumps(value):.8}"


def _curves(comparison: Comparison, quantity: str) -> dict[str, Series]:
    """The quantity of both runs, from step 1 to the last that either has."""
    return {
        f"{run.label} {run.path.name}": _series(
            {number: finite_number(step.get(quantity)) for number, step in run.by_step.items()},
            num_steps=_num_steps(comparison),
        )
        for run in (comparison.a, comparison.b)
    }


def _num_steps(comparison: Comparison) -> int:
    """Steps to draw: up to the last one that either run has, and no further than its recipe."""
    a, b = comparison.a, comparison.b
    most = max(a.num_steps, b.num_steps)
    return max((n for n in (*a.by_step, *b.by_step) if 1 <= n <= most), default=1)


def _series(values: Mapping[int, float | None], *, num_steps: int) -> Series:
    return [values.get(number) for number in range(1, num_steps + 1)]


def _pictures(comparison: Comparison) -> Iterator[Section]:
    """Loss, gradient norm, and how far apart they are."""
    for quantity in SHOWN:
        title = quantity.replace("_", " ").replace("grad", "gradient")
        yield Section(title.capitalize(), svg_plot(_curves(comparison, quantity), title=title))
    apart = {
        quantity: _series(
            {d.step: d.relative for d in comparison.of(quantity)},
            num_steps=_num_steps(comparison),
        )
        for quantity in SHOWN
    }
    yield Section("Relative difference", svg_plot(apart, title="relative difference"))


def _environments(comparison: Comparison) -> Iterator[tuple[str, Any, Any]]:
    first, second = comparison.a.environment, comparison.b.environment
    for name in sorted(first.keys() | second.keys()):
        yield name, first.get(name), second.get(name)


def _pairs(rows: Iterable[Sequence[Any]]) -> str:
    """A table of names with the value of each run, or that there is nothing to show."""
    told = [(name, *(json.dumps(value) for value in values)) for name, *values in rows]
    return table(("", "A", "B"), told) if told else paragraph("No difference.")
