"""A signal that asks to stop is noted, and what runs goes on."""

import os
import signal
import time

import pytest

from pith.run.stop import GENTLE, StopRequest


def test_a_process_that_was_not_asked_has_no_signal() -> None:
    with StopRequest.listening() as stop:
        assert stop.signal is None


@pytest.mark.parametrize(("first", "second"), [GENTLE, GENTLE[::-1]])
def test_the_first_signal_is_kept_and_later_ones_change_nothing(
    first: signal.Signals, second: signal.Signals
) -> None:
    with StopRequest.listening() as stop:
        for number in (first, second, first, second):
            os.kill(os.getpid(), number)
        assert stop.signal is first


def test_what_runs_goes_on_until_its_end() -> None:
    with StopRequest.listening() as stop:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        time.sleep(0.3)
        assert time.monotonic() - start >= 0.3
        assert stop.signal is signal.SIGTERM
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_handlers_come_back_even_after_an_error_and_others_are_left_alone() -> None:
    numbers = (*GENTLE, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    with StopRequest.listening():
        during = [signal.getsignal(number) for number in numbers]
    assert [was == now for was, now in zip(before, during, strict=True)] == [False] * 2 + [True] * 3
    assert [signal.getsignal(number) for number in numbers] == before

    with pytest.raises(KeyError), StopRequest.listening():
        raise KeyError
    assert [signal.getsignal(number) for number in numbers] == before


def test_requests_for_other_signals_are_apart() -> None:
    with StopRequest.listening() as gentle, StopRequest.listening([signal.SIGHUP]) as end:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (gentle.signal, end.signal) == (None, signal.SIGHUP)
