"""Time lost to communication, by a clock that only moves when told."""

import time
from dataclasses import dataclass

import pytest

from pith.comm.exchange import Pending
from pith.comm.stopwatch import Stopwatch


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Slow:
    """A communication that takes `seconds` to wait for."""

    clock: Clock
    seconds: float

    def wait(self) -> str:
        self.clock.now += self.seconds
        if self.seconds > 50:
            raise TimeoutError
        return "arrived"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_launching_and_waiting_count_to_their_phase_and_what_lies_between_does_not(
    clock: Clock,
) -> None:
    stopwatch, noticed = Stopwatch(), []
    stopwatch.notice = lambda phase: noticed.append((phase, clock.now))

    def start() -> Pending[str]:
        clock.now += 1
        return Slow(clock, 4)

    first, second = stopwatch.launch("dispatch", start), stopwatch.launch("combine", start)
    clock.now += 1000
    assert [second.wait(), first.wait()] == ["arrived", "arrived"]
    stopwatch.launch("dispatch", start)

    assert noticed == [("dispatch", 100), ("combine", 101), ("dispatch", 1110)]
    assert stopwatch.lap() == {"dispatch": 6, "combine": 5}
    assert stopwatch.lap() == {}


def test_time_until_a_failure_counts(clock: Clock) -> None:
    stopwatch = Stopwatch()
    with pytest.raises(TimeoutError):
        stopwatch.launch("combine", lambda: Slow(clock, 60)).wait()
    assert stopwatch.lap() == {"combine": 60}
