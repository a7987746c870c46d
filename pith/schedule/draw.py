"""A table as a picture for a terminal: one row per rank over simulated time."""

from textwrap import wrap

from pith.schedule.simulate import Span, simulate
from pith.schedule.table import Op, Placement, Table


def text(table: Table, *, width: int | None = None) -> str:
    """A title, one row per rank and a legend; F = I = W = 1, messages take no time.

    No line is longer than `width` columns (never fewer than 40; None is no limit). A picture that
    is too long is cut at the right, between slots, and each row counts the slots left out.
    Raises RunFailedError when the table cannot finish.
    """
    limit = None if width is None else max(width, 40)
    plan, place = simulate(table), table.placement
    title = (
        f"{table.name}: pp {place.pp}, stages {place.num_stages}, micro-batches "
        f"{table.num_micro_batches}; time {plan.makespan}, bubble {plan.bubble} (F = I = W = 1)"
    )
    margin = len(f"rank {place.pp - 1}  ")
    unit = max(_columns(span, place) for row in plan.rows for span in row)
    end = plan.makespan
    if limit is not None and margin + end * unit > limit:
        end = (limit - margin - len(f"+{max(map(len, table.rows))}")) // unit
    rows = [
        f"{f'rank {rank}':<{margin}}{_row(spans, place, unit=unit, end=end)}".rstrip()
        for rank, spans in enumerate(plan.rows)
    ]
    folded = [wrap(line, limit) if limit else [line] for line in (title, _legend(place))]
    return "\n".join([*folded[0], *rows, *folded[1]])


def _row(spans: tuple[Span, ...], place: Placement, *, unit: int, end: int) -> str:
    """The cells that end by time `end`, and the number of those that do not."""
    picture, clock = "", 0
    shown = [span for span in spans if span.end <= end]
    for span in shown:
        picture += _idle(span.start - clock, unit)
        picture += f"{_label(span, place):-<{(span.end - span.start) * unit - 1}} "
        clock = span.end
    if len(shown) == len(spans):
        return picture + _idle(end - clock, unit)
    return f"{picture:<{end * unit}}+{len(spans) - len(shown)}"


def _idle(time: int, unit: int) -> str:
    return f"{'.':<{unit}}" * time


def _columns(span: Span, place: Placement) -> int:
    """The columns per time unit that the label of a span and a space need."""
    return -(-(len(_label(span, place)) + 1) // (span.end - span.start))


def _label(span: Span, place: Placement) -> str:
    return "|".join(_operation(op, place) for op in span.slot)


def _operation(op: Op, place: Placement) -> str:
    """Kind and micro-batch, in lower case on a rank's second stage; in full when it has more."""
    if place.num_stages > 2 * place.pp:
        return str(op)
    return f"{op.kind if op.stage < place.pp else op.kind.lower()}{op.micro}"


def _legend(place: Placement) -> str:
    number = "the number is the micro-batch"
    if place.num_stages > 2 * place.pp:
        number = "then stage.micro-batch"
    elif place.num_stages > place.pp:
        number += ", lower case the rank's second stage"
    return (
        f"F forward, B backward, I input gradient, W weight gradient; {number}; "
        "F|B an overlapped pair; - still running; . idle; +N slots not shown"
    )
