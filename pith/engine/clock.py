"""When slots begin and end, in seconds since a moment that all ranks share.

A span starts when the first operation of its slot (of a pair the backward, which leads) has its
input, and ends when the slot has computed, before results are sent. Waiting for that input, posting
receives and sending lie between spans. The exchange with experts lies inside, launched and waited
for, and so does a pair's wait for the input of its forward.
"""

import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from pith.schedule.simulate import Span
from pith.schedule.table import Slot

Moment = TypeVar("Moment")


class Clock:
    """Notes nothing: the clock of a step that is not traced."""

    name = "none"

    def zero(self) -> None:
        """Time starts: called when all ranks have just left a collective that hosts wait for."""

    def begin(self) -> None:
        """A slot begins, unless one has begun already."""

    def end(self, slot: Slot) -> None:
        """The slot that began has ended; it was `slot`."""

    def spans(self) -> tuple[Span, ...]:
        """What was noted, in order, in seconds since zero; asked once the step is over."""
        return ()


class _Noting(Clock, ABC, Generic[Moment]):
    """Notes moments, and turns them into seconds only when asked."""

    def __init__(self) -> None:
        self._zero: Moment | None = None
        self._begun: Moment | None = None
        self._noted: list[tuple[Slot, Moment, Moment]] = []

    @abstractmethod
    def _now(self) -> Moment: ...

    @abstractmethod
    def _seconds(self, since: Moment, until: Moment) -> float: ...

    def zero(self) -> None:
        self._zero = self._now()

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._now()

    def end(self, slot: Slot) -> None:
        assert self._begun is not None, f"{slot} ends and never began"
        self._noted.append((slot, self._begun, self._now()))
        self._begun = None

    def spans(self) -> tuple[Span, ...]:
        zero = self._zero
        assert zero is not None, "the clock was never set to zero"
        return tuple(
            Span(slot, self._seconds(zero, start), self._seconds(zero, end))
            for slot, start, end in self._noted
        )


class HostClock(_Noting[float]):
    """The host's own time: right where the host computes and waits itself, as on a CPU over gloo.

    Ranks of one machine differ by what their host takes to leave the collective.
    """

    name = "host"

    def _now(self) -> float:
        return time.perf_counter()

    def _seconds(self, since: float, until: float) -> float:
        return until - since


class DeviceClock(_Noting[torch.cuda.Event]):
    """The time of a CUDA device: events on the current stream, which no host waits for.

    `Work.wait()` of NCCL makes the stream wait, so that an event behind it is behind the arrival.
    Time in which the device idles inside a slot, because its host launches too slowly, is in the
    span. Making a clock waits for the device: zero must not queue behind earlier work.
    """

    name = "device"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        torch.cuda.synchronize(device)

    def spans(self) -> tuple[Span, ...]:
        torch.cuda.synchronize(self._device)  # an event that has not come yet has no time
        return super().spans()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, since: torch.cuda.Event, until: torch.cuda.Event) -> float:
        return float(since.elapsed_time(until)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """A clock for a step whose slots run on `device`."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
