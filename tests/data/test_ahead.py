"""Processes that work ahead: order, errors and deaths of either side. Their work is the standard
library's, which a new process can import."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pith.data.ahead import WorkerLostError, in_processes

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("num_items", [0, 1, 3, 10])
def test_results_come_in_order_and_items_are_taken_only_as_processes_are_free(num_items) -> None:
    taken = []

    def items() -> Iterator[int]:
        for k in range(num_items):
            taken.append(k)
            yield k

    for k, result in enumerate(in_processes(math.factorial, items(), num_workers=3)):
        assert result == math.factorial(k)
        assert len(multiprocessing.active_children()) == min(3, num_items)
        assert len(taken) <= k + 1 + 3
    assert len(taken) == num_items
    assert not multiprocessing.active_children()


def test_messages_larger_than_any_buffer_pass_both_ways() -> None:
    items = [bytes([ord("a") + k]) * 8_000_000 for k in range(5)]
    results = list(in_processes(bytes.upper, items, num_workers=2))
    assert results == [item.upper() for item in items]


def test_an_error_is_raised_in_its_turn_and_is_no_death() -> None:
    results = in_processes(os.listdir, ["/", "/", "/nowhere", "/"], num_workers=2)
    assert next(results) == next(results) == os.listdir("/")
    with pytest.raises(FileNotFoundError, match="/nowhere") as caught:
        next(results)
    assert "in _attempt" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_a_death_is_named_and_an_interrupt_is_none() -> None:
    numbers = [signal.SIGINT, signal.SIGKILL, signal.SIGINT, signal.SIGINT]
    with pytest.raises(WorkerLostError):
        list(in_processes(signal.raise_signal, numbers, num_workers=2))
    assert not multiprocessing.active_children()
    assert list(in_processes(signal.raise_signal, [signal.SIGINT] * 3, num_workers=2)) == [None] * 3


def test_processes_that_die_while_they_are_sent_an_item_are_lost() -> None:
    results = in_processes(len, [bytes(8_000_000)] * 6, num_workers=2)
    assert next(results) == 8_000_000
    time.sleep(0.3)  # both have answered
    pids = [child.pid or 0 for child in multiprocessing.active_children()]

    def send(number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    send(signal.SIGSTOP)
    threading.Timer(0.3, send, [signal.SIGKILL]).start()
    with pytest.raises(WorkerLostError):
        list(results)
    assert not multiprocessing.active_children()


def test_leaving_early_ends_processes_that_work_or_are_stopped() -> None:
    results = in_processes(time.sleep, [0, 600, 600], num_workers=2)
    next(results)
    first, second = multiprocessing.active_children()
    os.kill(first.pid or 0, signal.SIGSTOP)
    time.sleep(0.2)  # until it stands still
    try:
        results.close()
    finally:
        first.kill()
    assert not multiprocessing.active_children()
    assert not second.is_alive()


ORPHANING = """
import os, signal, time
from pith.data.ahead import in_processes

def items():
    yield from (0, 0, 0, 0, 0.5, 0.5)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

list(in_processes(time.sleep, items(), num_workers=NUM))
"""


@pytest.mark.parametrize("num_workers", [2, 6])
def test_a_process_ends_with_its_parent_whether_it_works_or_waits(num_workers) -> None:
    command = [sys.executable, "-c", ORPHANING.replace("NUM", str(num_workers))]
    # The output ends when no process holds it any longer.
    ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, b"", b"")
