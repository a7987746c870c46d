"""`pith train` on two processes, ended from outside and as a part of an outer job."""

import json
import signal
import socket
from typing import Any

import pytest


def slurm_step(num_ranks: int) -> tuple[dict[str, str], ...]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return tuple(
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(num_ranks),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_ID": "1",
            "MASTER_PORT": str(port),
        }
        for rank in range(num_ranks)
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_ends_every_rank(train: Any, number: int, status: int) -> None:
    (outcome,) = train("--json", "--set", "training.steps=5000", signal_after_step_1=number)

    assert outcome.status == status, outcome.stderr
    assert json.loads(outcome.stdout)["exit"] == status
    assert "Traceback" not in outcome.stderr
    assert "death signal" not in outcome.stderr
    assert ("stopped by SIGTERM" in outcome.stderr) == (number == signal.SIGTERM)
    assert outcome.survivors == []


def test_in_a_slurm_step_the_failing_rank_speaks_and_all_end(train: Any) -> None:
    first, second = train("--inject-fault", "raise:backward:1:2", variables=slurm_step(2))

    assert (first.status, second.status) == (4, 4), first.stderr + second.stderr
    assert "ordered at backward of step 2" in second.stderr.splitlines()[-1]
    assert "ordered" not in first.stderr


def test_ranks_that_never_come_are_one_line_that_counts_those_that_did(train: Any) -> None:
    (first,) = train("--timeout", "1", variables=slurm_step(2)[:1])

    assert first.status == 1, first.stderr
    assert "1 of 2 came; wanted 2 within 1 s" in first.stderr.splitlines()[-1]
    assert "Traceback" not in first.stderr
