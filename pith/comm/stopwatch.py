"""How long this rank's host is held up by communication."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pith.comm.exchange import Pending

T = TypeVar("T")


def _say_nothing(phase: str) -> None:
    pass


class Stopwatch:
    """Host seconds by phase of communication, launching and waiting, since the last `lap`.

    Over gloo that is the time lost to communication; NCCL runs on the device while the host goes
    on, and there the figures say little. `notice` is called with a phase before it begins.
    """

    def __init__(self) -> None:
        self.notice: Callable[[str], None] = _say_nothing
        self._seconds: dict[str, float] = {}

    def lap(self) -> dict[str, float]:
        """The seconds so far by phase, which start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Count what happens inside to `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def call(self, phase: str, function: Callable[[], T]) -> T:
        """Do with `function` all of a communication, its waiting too."""
        self.notice(phase)
        with self.running(phase):
            return function()

    def launch(self, phase: str, start: Callable[[], Pending[T]]) -> Pending[T]:
        """Launch a communication with `start`; its wait counts to `phase` too."""
        self.notice(phase)
        with self.running(phase):
            return _Timed(start(), phase, self)


@dataclass(frozen=True, slots=True)
class _Timed(Generic[T]):
    pending: Pending[T]
    phase: str
    stopwatch: Stopwatch

    def wait(self) -> T:
        with self.stopwatch.running(self.phase):
            return self.pending.wait()
