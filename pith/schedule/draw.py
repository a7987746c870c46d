"""A timeline as a picture for a terminal: one row per rank over time."""

from textwrap import wrap

from pith.schedule.simulate import Span
from pith.schedule.table import Op, Placement
from pith.schedule.timeline import Timeline, stretch

_NO_ROOM = "#"
_Cell = tuple[str, int, int]  # label, first column, column after the last


def text(timeline: Timeline, *, width: int | None = None) -> str:
    """A title, one row per rank and a legend; columns are proportional to time.

    No line is longer than `width` columns (never fewer than 40; None is no limit). A picture that
    is too long is cut at the right, between slots. A slot that has no room for its label shows `#`.
    Each row counts the slots left out, for either reason: no column left, or too short for one.
    """
    limit = None if width is None else max(width, 40)
    place, scale = timeline.table.placement, _columns_per_unit(timeline)
    dot = scale if isinstance(scale, int) else 3
    rows = [_cells(spans, place, scale) for spans in timeline.rows]
    margin = len(f"rank {len(rows) - 1}  ")
    columns = round(timeline.makespan * scale)
    is_short = any(start == end for row in rows for _, start, end in row)
    if limit is not None and (is_short or margin + columns > limit):
        room = limit - margin - len(f"+{max(map(len, rows))}")
        columns = min(columns, room - room % dot)
    lines = [
        f"{f'rank {rank}':<{margin}}{_row(cells, columns, dot=dot)}".rstrip()
        for rank, cells in enumerate(rows)
    ]
    title = f"{timeline.title}; {timeline.summary}"
    legend = _legend(place, has_no_room=any(_NO_ROOM in line for line in lines))
    folded = [wrap(line, limit) if limit else [line] for line in (title, legend)]
    return "\n".join([*folded[0], *lines, *folded[1]])


def _columns_per_unit(timeline: Timeline) -> int | float:
    """Columns for a unit of time: a whole number where times are whole, unless fewer will do."""
    place, rows = timeline.table.placement, timeline.rows
    whole = -(-stretch(rows, lambda span: len(_label(span, place)) + 1) // 1)
    # One more than label and space need: rounding may take it.
    fine = stretch(rows, lambda span: len(_label(span, place)) + 2)
    is_whole = all(time % 1 == 0 for row in rows for span in row for time in (span.start, span.end))
    return int(whole) if is_whole and whole <= fine else fine


def _cells(spans: tuple[Span, ...], place: Placement, scale: float) -> list[_Cell]:
    return [
        (_label(span, place), round(span.start * scale), round(span.end * scale)) for span in spans
    ]


def _row(cells: list[_Cell], columns: int, *, dot: int) -> str:
    """The cells that end by `columns`, and the number of slots that are not seen."""
    picture = ""
    shown = [cell for cell in cells if cell[1] < cell[2] <= columns]
    for label, start, end in shown:
        picture += _idle(start - len(picture), dot) + _cell(label, end - start)
    if len(shown) == len(cells):
        return picture + _idle(columns - len(picture), dot)
    return f"{picture:<{columns}}+{len(cells) - len(shown)}"


def _cell(label: str, columns: int) -> str:
    fill = label if len(label) < columns else _NO_ROOM * (columns - 1)
    return f"{fill:-<{columns - 1}} " if columns > 1 else _NO_ROOM


def _idle(columns: int, dot: int) -> str:
    """A dot every `dot` columns, and a space before what comes next."""
    return (f"{'.':<{dot}}" * columns)[: max(columns - 1, 0)] + " " * min(columns, 1)


def _label(span: Span, place: Placement) -> str:
    return "|".join(_operation(op, place) for op in span.slot)


def _operation(op: Op, place: Placement) -> str:
    """Kind and micro-batch, in lower case on a rank's second stage; in full when it has more."""
    if place.num_stages > 2 * place.pp:
        return str(op)
    return f"{op.kind if op.stage < place.pp else op.kind.lower()}{op.micro}"


def _legend(place: Placement, *, has_no_room: bool) -> str:
    number = "the number is the micro-batch"
    if place.num_stages > 2 * place.pp:
        number = "then stage.micro-batch"
    elif place.num_stages > place.pp:
        number += ", lower case the rank's second stage"
    no_room = f"; {_NO_ROOM} no room for the label" if has_no_room else ""
    return (
        f"F forward, B backward, I input gradient, W weight gradient; {number}; "
        f"F|B an overlapped pair; - still running{no_room}; . idle; +N slots not shown"
    )
