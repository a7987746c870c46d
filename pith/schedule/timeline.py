"""A timeline: which slot every rank ran when. Planned and measured ones are drawn by the same code.

`pith.schedule.draw` (text), `pith.schedule.svg` and `pith.schedule.chrome` take nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pith.schedule.costs import Costs, Number, PerStage
from pith.schedule.simulate import Simulation, Span, live
from pith.schedule.table import Kind, Op, Table

_FEW = 4  # a picture gives slots at most so many times the room that their labels need


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of every pipeline rank, from a common zero; what lies between them is idle.

    unit     None: the abstract time units of a plan; "s": seconds
    costs    what the plan assumed; of a measured timeline only its activations are read
    measured whether the spans really ran

    A measured timeline is `dataclasses.replace(planned, rows=..., unit="s", measured=True)`. Clocks
    are not exact: a span that begins before zero or before the end of the one before it is cut to
    begin there.
    """

    table: Table
    rows: tuple[tuple[Span, ...], ...]
    title: str
    unit: str | None
    costs: Costs
    measured: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(_in_order(row) for row in self.rows))

    @classmethod
    def planned(cls, simulation: Simulation) -> "Timeline":
        """The timeline of a plan."""
        table, place = simulation.table, simulation.table.placement
        title = (
            f"{table.name}: pp {place.pp}, stages {place.num_stages}, "
            f"micro-batches {table.num_micro_batches}"
        )
        return cls(table, simulation.rows, title, None, simulation.costs)

    @property
    def makespan(self) -> Number:
        """The end of the last span."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def bubble(self) -> Number:
        """The makespan less the busy time of the busiest rank."""
        busy = (sum(span.end - span.start for span in row) for row in self.rows)
        return self.makespan - max(busy, default=0)

    @property
    def summary(self) -> str:
        """Makespan and bubble with their unit: "time 9, bubble 3 (F = I = W = 1)"."""
        origin = "measured" if self.measured else _costs_text(self.costs)
        return f"time {self.say(self.makespan)}, bubble {self.say(self.bubble)} ({origin})"

    @property
    def scale(self) -> tuple[int, str]:
        """By what a time is multiplied before it is shown, and the unit that it is then in."""
        if self.unit != "s":
            return 1, self.unit or ""
        by_size = ((1.0, 1, "s"), (1e-3, 1000, "ms"), (0.0, 1_000_000, "us"))
        return next((by, unit) for least, by, unit in by_size if self.makespan >= least)

    def say(self, time: Number) -> str:
        """A time in words: "12", "412.3 ms"."""
        by, unit = self.scale
        return f"{number(time * by)} {unit}".rstrip()

    def live(self, rank: int) -> tuple[tuple[Number, Number], ...]:
        """(time, activations held from then on) of a rank, wherever that changes."""
        row = self.rows[rank]
        # A micro-batch that goes forward and back in one pair holds nothing before or after: what
        # is live during it is what the slot before it has left.
        nothing = (Op(Kind.F, 0, 0), Op(Kind.B, 0, 0))
        counts = live(tuple(slot for span in row for slot in (span.slot, nothing)), self.costs)
        seen: dict[Number, Number] = {}
        for span, during, after in zip(row, counts[::2], counts[1::2], strict=True):
            seen[span.start] = during
            seen[span.end] = after
        steps = tuple((time, round(held, 6) + 0) for time, held in seen.items())
        return tuple(
            step for turn, step in enumerate(steps) if turn == 0 or step[1] != steps[turn - 1][1]
        )


def stretch(rows: tuple[tuple[Span, ...], ...], need: Callable[[Span], float]) -> float:
    """The room for one unit of time at which every span has the room that it needs.

    But no more than `_FEW` times what the spans need in sum: then the shortest ones go without.
    """
    spans = [span for row in rows for span in row if span.end > span.start]
    if not spans:
        return 1.0
    busy = sum(span.end - span.start for span in spans)
    enough = max(need(span) / (span.end - span.start) for span in spans)
    return min(enough, _FEW * sum(need(span) for span in spans) / busy)


def number(value: Number) -> str:
    """A whole number as it is, another one in five digits or without a fraction."""
    return f"{value:.0f}" if value % 1 == 0 or value >= 10_000 else f"{value:.5g}"


def _in_order(row: tuple[Span, ...]) -> tuple[Span, ...]:
    spans = []
    clock: Number = 0
    for span in row:
        start = max(clock, span.start)
        clock = max(start, span.end)
        spans.append(Span(span.slot, start, clock))
    return tuple(spans)


def _costs_text(costs: Costs) -> str:
    """ "F = I = W = 1", or "F = 2, I = 1 to 3, W = 1, pair 0.9": what the times of a plan mean."""
    times = [_range(cost) for cost in (costs.f, costs.i, costs.w)]
    text = "F = {}, I = {}, W = {}".format(*times)
    if len(set(times)) == 1:
        text = f"F = I = W = {times[0]}"
    if costs.comm:
        text += f", messages {_range(costs.comm)}"
    return text if costs.pair == 1 else f"{text}, pair {number(costs.pair)}"


def _range(cost: PerStage) -> str:
    if not isinstance(cost, tuple):
        return number(cost)
    low, high = number(min(cost)), number(max(cost))
    return low if low == high else f"{low} to {high}"
