"""Signals that ask a process to save and stop: they leave a note, and the work goes on with it."""

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

# What a cluster sends before it kills: the run saves and stops at the end of its step.
GENTLE = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether a signal has asked this process to stop: `signal` is the first that did, or None.

    The handler only takes note: one that raises is lost where it runs inside a hook of fork.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def listen(self, numbers: Collection[signal.Signals] = GENTLE) -> None:
        """Take note of `numbers` from now until this process ends."""
        for number in numbers:
            signal.signal(number, self._note)

    @classmethod
    @contextmanager
    def listening(cls, numbers: Collection[signal.Signals] = GENTLE) -> Iterator["StopRequest"]:
        """Take note of `numbers` for a while; then they do again what they did before."""
        before = {number: signal.getsignal(number) for number in numbers}
        request = cls()
        request.listen(numbers)
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
