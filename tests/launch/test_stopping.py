"""Signals that ask a job to save and stop, wherever they arrive: all ranks stop, status 75."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pith.errors import StoppedError
from pith.launch.elastic import GRACE_S
from tests.launch.conftest import finish, start
from tests.launch.fake_training import ASKED_STEP, NUM_STEPS, SLOW_S

STATUS = StoppedError.exit_status


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("asked_through_the_launcher", "SIGTERM"),
        ("asked_in_rank_1", "SIGUSR1"),
        ("asked_in_all_ranks", "SIGTERM"),
        ("asked_without_space_for_a_word", "SIGTERM"),
    ],
)
def test_all_ranks_stop_soon_and_one_line_says_so(asked: Any, name: str, number: str) -> None:
    outcome = asked[name]

    assert outcome.status == STATUS, outcome.stderr
    (line,) = outcome.stderr.splitlines()
    said, _, step = line.partition("; ")[0].rpartition(" ")
    assert said == f"error: stopped by {number} at step"  # its prefix is of run_fake.py
    assert ASKED_STEP <= int(step) < NUM_STEPS


def test_a_save_may_take_longer_than_a_rank_may_outlive_a_failure(asked: Any) -> None:
    assert asked["asked_through_the_launcher"].seconds > SLOW_S > GRACE_S


def test_a_job_that_ends_before_it_heard_of_the_stop_has_succeeded(asked: Any) -> None:
    outcome = asked["asked_too_late"]

    assert (outcome.status, outcome.summary, outcome.stderr) == (0, {"steps": 3}, "")


def test_a_rank_that_is_killed_while_it_saves_is_named(asked: Any) -> None:
    outcome = asked["asked_and_killed_in_rank_2"]

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "rank 2 was killed by SIGKILL" in line
    assert "slot save" in line
    assert outcome.seconds < GRACE_S + 3


def test_an_interrupt_ends_a_save_at_once(asked: Any) -> None:
    outcome = asked["asked_and_interrupted"]

    assert (outcome.status, outcome.stderr) == (130, "")
    assert outcome.seconds < GRACE_S


def test_under_torchrun_rank_0_speaks_for_all_and_each_has_the_status(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("run_joined.py"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    numbers = {"asked_through_the_launcher": "SIGTERM", "asked_in_rank_1": "SIGUSR1"}
    for fake in numbers:
        (tmp_path / fake).mkdir()
    jobs = [start([*torchrun, *meeting, script, fake], tmp_path / fake, {}) for fake in numbers]

    for job, (fake, number) in zip(jobs, numbers.items(), strict=True):
        outcome = finish(job)
        (report,) = map(json.loads, outcome.stdout.splitlines())
        assert (report["ok"], report["exit"]) == (False, STATUS), outcome.stderr
        (line,) = [line for line in outcome.stderr.splitlines() if "stopped by" in line]
        assert line.startswith(f"stopped by {number} at step ")
        statuses = [path.read_text() for path in (tmp_path / fake).glob("status-*")]
        assert statuses == [str(STATUS)] * 2, outcome.stderr
        assert outcome.survivors == []
