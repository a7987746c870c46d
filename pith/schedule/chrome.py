"""Timelines as one trace in Chrome's trace event format, which Perfetto and chrome://tracing open.

Each timeline is a process, each of its ranks a thread with a slice for every slot, an arrow for
every message between ranks and a counter of live activations. All begin at zero, to be compared.

Source of the format: "Trace Event Format" of the Chromium project.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from pith.schedule.costs import Number
from pith.schedule.lower import arrival, departure
from pith.schedule.simulate import Span
from pith.schedule.table import Kind, Op, slot_text
from pith.schedule.timeline import Timeline

_Event = dict[str, Any]

# Times are multiples of 1/64 us. Those are exact in binary and in decimals, so that no sum of ts
# and dur lies behind the start of the next slice: readers drop slices that overlap.
_TICKS = 64
_UNIT_US = 1000  # a time unit of a plan
_RANKS = 1000  # threads of a process: some readers know a thread by its number alone
_COLOURS = {
    (Kind.F,): "rail_response",
    (Kind.B,): "rail_idle",
    (Kind.I,): "yellow",
    (Kind.W,): "rail_load",
    (Kind.F, Kind.B): "rail_animation",
}


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace, ready for `json.dump`; times in microseconds, a unit of a plan drawn as 1000.

    A message has no arrow where the clocks of its ranks say that it was received before it was
    sent, nor where a slot takes no time.
    """
    ids = count(1)
    events: list[_Event] = []
    for pid, timeline in enumerate(timelines, start=1):
        events += _process(timeline, pid, ids)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(timeline: Timeline, pid: int, ids: Iterator[int]) -> list[_Event]:
    """The events of a timeline by time, a slice before what binds to it."""
    events = [*_slices(timeline, pid), *_arrows(timeline, pid, ids), *_counters(timeline, pid)]
    return [*_names(timeline, pid), *sorted(events, key=lambda event: event["ts"])]


def _names(timeline: Timeline, pid: int) -> Iterator[_Event]:
    origin = "measured" if timeline.measured else "planned"
    drawn = "" if timeline.unit else f"; a time unit is drawn as {_UNIT_US} us"
    for name, value in (
        ("process_name", {"name": f"{origin} {timeline.title}"}),
        ("process_labels", {"labels": f"{timeline.summary}{drawn}"}),
        ("process_sort_index", {"sort_index": pid}),
    ):
        yield {"ph": "M", "name": name, "pid": pid, "tid": pid * _RANKS, "args": value}
    for rank in range(len(timeline.rows)):
        at = {"ph": "M", "pid": pid, "tid": pid * _RANKS + rank}
        yield at | {"name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield at | {"name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline, pid: int) -> Iterator[_Event]:
    for rank, row in enumerate(timeline.rows):
        for span in row:
            start, end = _ticks(timeline, span.start), _ticks(timeline, span.end)
            kinds = tuple(op.kind for op in span.slot)
            yield {
                "ph": "X",
                "name": slot_text(span.slot),
                "cat": ",".join(kinds),
                "pid": pid,
                "tid": pid * _RANKS + rank,
                "ts": _us(start),
                "dur": _us(end - start),
                "cname": _COLOURS[kinds],
                "args": _operation(span.slot[0])
                if len(span.slot) == 1
                else {"forward": _operation(span.slot[0]), "backward": _operation(span.slot[1])},
            }


def _operation(op: Op) -> dict[str, str | int]:
    return {"kind": op.kind.value, "stage": op.stage, "micro": op.micro}


def _arrows(timeline: Timeline, pid: int, ids: Iterator[int]) -> Iterator[_Event]:
    """For each message two events with one id, within the slices that send and receive it."""
    table = timeline.table
    spans = [(span, op) for row in timeline.rows for span in row for op in span.slot]
    receivers = {message: span for span, op in spans if (message := arrival(table, op))}
    for sender, op in spans:
        message = departure(table, op)
        if message is None or message not in receivers:
            continue
        if (times := _ends(timeline, sender, receivers[message])) is None:
            continue
        shared = {"name": str(message), "cat": "message", "id": next(ids), "pid": pid}
        sent, received = times
        yield shared | {"ph": "s", "tid": pid * _RANKS + message.source, "ts": _us(sent)}
        at = {"ph": "f", "bp": "e", "tid": pid * _RANKS + message.target, "ts": _us(received)}
        yield shared | at


def _ends(timeline: Timeline, sender: Span, receiver: Span) -> tuple[int, int] | None:
    """The last moment of the sender and the first of the receiver, in order; or None."""
    sending, receiving = (
        range(_ticks(timeline, span.start), _ticks(timeline, span.end))
        for span in (sender, receiver)
    )
    if not sending or not receiving:
        return None
    sent = min(sending[-1], receiving[-1])
    return (sent, max(sent, receiving[0])) if sent >= sending[0] else None


def _counters(timeline: Timeline, pid: int) -> Iterator[_Event]:
    for rank in range(len(timeline.rows)):
        at = {"ph": "C", "name": f"rank {rank}", "pid": pid, "tid": pid * _RANKS + rank}
        for time, held in timeline.live(rank):
            ts = _us(_ticks(timeline, time))
            yield at | {"ts": ts, "args": {"live activations": held}}


def _ticks(timeline: Timeline, time: Number) -> int:
    return round(time * (1_000_000 if timeline.unit == "s" else _UNIT_US) * _TICKS)


def _us(ticks: int) -> Number:
    """Microseconds; whole ones as an integer."""
    return ticks / _TICKS if ticks % _TICKS else ticks // _TICKS
