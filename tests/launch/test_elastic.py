"""One rank fails while the others wait for it: the job ends soon and names the culprit."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pith.errors import RunFailedError, StoppedError
from pith.launch import elastic
from pith.launch.worker import await_peers
from pith.run.job import Job
from pith.run.progress import Progress
from pith.run.stop import StopRequest
from tests.launch import fake_training

LIMIT_S = 15.0
TIMEOUT_S = 3.0  # of a collective among the ranks of which one is stopped


def test_the_report_of_rank_0_comes_back_and_ranks_leave_stdout_alone(fakes: Any) -> None:
    outcome = fakes["sums_ranks"]

    assert outcome.status == 0, outcome.stderr
    assert outcome.summary == {"sum": 3, "name": "sums_ranks"}
    assert outcome.stderr.count("words on stdout") == 3


@pytest.mark.parametrize("name", ["raises_in_rank_1", "raises_late_in_rank_1"])
def test_a_rank_that_raises_ends_the_job_with_its_own_traceback_last(fakes: Any, name: str) -> None:
    outcome = fakes[name]

    assert outcome.status == 4
    lines = outcome.stderr.splitlines()
    assert lines[-1] == "ValueError: the culprit speaks"
    assert "in _raise_value_error" in lines[-3] + lines[-2]
    assert "rank 1 failed at step 7, slot F0.3" in outcome.stderr
    assert "gloo" not in outcome.stderr
    assert outcome.seconds < LIMIT_S


def test_a_killed_rank_is_one_line_with_rank_signal_step_and_slot(fakes: Any) -> None:
    outcome = fakes["killed_in_rank_2"]

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "rank 2 was killed by SIGKILL at step 7, slot F0.3" in line
    assert outcome.seconds < LIMIT_S


def test_an_error_of_pith_in_a_rank_keeps_its_exit_status_and_is_one_line(fakes: Any) -> None:
    outcome = fakes["non_finite_in_rank_0"]

    assert outcome.status == 1
    assert outcome.stderr == "error: step 7: loss is nan; next: lower lr\n"
    assert outcome.seconds < LIMIT_S


def test_a_rank_that_ends_without_a_word_is_named_with_its_status(fakes: Any) -> None:
    outcome = fakes["leaves_with_a_status_in_rank_1"]

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "rank 1 ended with status 9" in line
    assert outcome.seconds < LIMIT_S


def test_a_stopped_rank_is_found_by_the_timeout_and_named(fakes: Any) -> None:
    outcome = fakes["stopped_in_rank_2"]

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "stopped answering: rank 2 at step 7, slot F0.3" in line
    assert outcome.seconds < TIMEOUT_S + 30


def test_a_rank_that_is_killed_ends_those_that_do_not_notice_it(fakes: Any) -> None:
    outcome = fakes["killed_in_rank_2_while_others_sleep"]

    assert outcome.status == 1
    assert "rank 2 was killed by SIGKILL at step 7" in outcome.stderr
    assert outcome.seconds < elastic.GRACE_S + 3


@pytest.fixture
def at_fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls what is given to it once, in the process that `side` names, at the second fork."""
    monkeypatch.setattr(elastic.torch.cuda, "is_available", lambda: False)  # no spawn
    forks: list[int] = []
    over: list[bool] = []

    def act(function: Any, *, side: str) -> None:
        def call() -> None:
            if len(forks) == 2 and not over:
                function()

        os.register_at_fork(before=lambda: forks.append(1), **{f"after_in_{side}": call})

    yield act
    over.append(True)  # a hook stays for good


def waits_to_be_asked(job: Job, stop: StopRequest) -> None:
    for _ in range(1000):
        time.sleep(0.01)
        if stop.signal:
            raise StoppedError("run.stopped", what=f"stopped by {stop.signal.name}")


def test_a_signal_during_the_fork_of_a_rank_reaches_those_that_have_not_begun(
    tmp_path: Path, at_fork: Any
) -> None:
    asked = []

    def ask() -> None:  # an exception in it would be swallowed
        asked.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    at_fork(ask, side="parent")
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        elastic.launch(waits_to_be_asked, Job("", "x", str(tmp_path)), num_ranks=3)

    assert asked == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_dies_before_it_begins_ends_those_that_wait_for_it(
    tmp_path: Path, at_fork: Any
) -> None:
    at_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), side="child")
    start = time.monotonic()

    with pytest.raises(RunFailedError, match="rank 1 was killed by SIGKILL at its start"):
        elastic.launch(fake_training.sums_ranks, Job("", "x", str(tmp_path)), num_ranks=3)

    assert time.monotonic() - start < elastic.GRACE_S


def test_no_rank_connects_while_another_is_still_to_be_forked(tmp_path: Path) -> None:
    job = Job("", "fake", str(tmp_path))
    args = (job, StopRequest())
    waiting = threading.Thread(target=await_peers, args=args, kwargs={"num_ranks": 3}, daemon=True)
    for rank in (0, 2):
        Progress(job.progress_path(rank)).set(0, "start")
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "rank 1 has not been started"
    Progress(job.progress_path(1)).set(0, "start")
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_rank_that_is_to_stop_waits_for_no_other_to_begin(tmp_path: Path) -> None:
    with StopRequest.listening() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StoppedError, match="stopped by SIGUSR1 before the first step"):
            await_peers(Job("", "fake", str(tmp_path)), stop, num_ranks=1)
