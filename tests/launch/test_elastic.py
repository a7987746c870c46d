"""One rank fails while the others wait for it: the job ends soon and names the culprit."""

import json
from typing import Any

import pytest

LIMIT_S = 15.0


def test_the_report_of_rank_0_comes_back_and_ranks_leave_stdout_alone(fake: Any) -> None:
    outcome = fake("sums_ranks")

    assert outcome.status == 0, outcome.stderr
    assert json.loads(outcome.stdout)["summary"] == {"sum": 3, "name": "sums_ranks"}
    assert outcome.stderr.count("words on stdout") == 3


@pytest.mark.parametrize("name", ["raises_in_rank_1", "raises_late_in_rank_1"])
def test_a_rank_that_raises_ends_the_job_with_its_own_traceback_last(fake: Any, name: str) -> None:
    outcome = fake(name)

    assert outcome.status == 4
    lines = outcome.stderr.splitlines()
    assert lines[-1] == "ValueError: the culprit speaks"
    assert "in _raise_value_error" in lines[-3] + lines[-2]
    assert "rank 1 failed at step 7, slot F0.3" in outcome.stderr
    assert "gloo" not in outcome.stderr
    assert_all_ended(outcome)


def test_a_killed_rank_is_one_line_with_rank_signal_step_and_slot(fake: Any) -> None:
    outcome = fake("killed_in_rank_2")

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "rank 2 was killed by SIGKILL at step 7, slot F0.3" in line
    assert_all_ended(outcome)


def test_an_error_of_pith_in_a_rank_keeps_its_exit_status_and_is_one_line(fake: Any) -> None:
    outcome = fake("non_finite_in_rank_0")

    assert outcome.status == 1
    assert outcome.stderr == "error: step 7: loss is nan; next: lower lr\n"
    assert_all_ended(outcome)


def test_a_rank_that_ends_without_a_word_is_named_with_its_status(fake: Any) -> None:
    outcome = fake("leaves_with_a_status_in_rank_1")

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "rank 1 ended with status 9" in line
    assert_all_ended(outcome)


def test_a_stopped_rank_is_found_by_the_timeout_and_named(fake: Any) -> None:
    outcome = fake("stopped_in_rank_2", timeout_s=3)

    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert "stopped answering: rank 2 at step 7, slot F0.3" in line
    assert_all_ended(outcome, limit_s=3 + 30)


def assert_all_ended(outcome: Any, *, limit_s: float = LIMIT_S) -> None:
    assert json.loads(outcome.stdout)["seconds"] < limit_s
    assert outcome.survivors == []
