"""One rank fails while the others wait for it: the job ends soon and names the culprit."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pith.errors import RunFailedError
from pith.launch import elastic
from pith.launch.worker import await_peers
from pith.run.job import Job
from pith.run.progress import Progress

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


def sleeps(job: Job) -> None:
    signal.pause()


def test_a_signal_during_the_fork_of_a_rank_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = []

    def interrupt() -> None:
        if not forked:
            forked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    os.register_at_fork(after_in_parent=interrupt)  # an exception in it would be swallowed
    monkeypatch.setattr(elastic.torch.cuda, "is_available", lambda: False)
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(RunFailedError, match="stopped by SIGTERM"):
        elastic.launch(sleeps, Job("", "stopped", str(tmp_path)), num_ranks=2)

    assert forked
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_rank_connects_while_another_is_still_to_be_forked(tmp_path: Path) -> None:
    job = Job("", "fake", str(tmp_path))
    waiting = threading.Thread(
        target=await_peers, args=(job,), kwargs={"num_ranks": 3}, daemon=True
    )
    for rank in (0, 2):
        Progress(job.progress_path(rank)).set(0, "start")
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "rank 1 has not been started"
    Progress(job.progress_path(1)).set(0, "start")
    waiting.join(5)
    assert not waiting.is_alive()
