"""`pith train` as a whole, on two processes: it trains, and it ends well when a rank does not."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from pith.config import Recipe

KEYS = {
    "recipe",
    "layout",
    "world_size",
    "schedule",
    "steps",
    "first_loss",
    "last_loss",
    "validation_loss",
    "tokens_per_second",
    "run_dir",
    "checkpoint",
}
METRICS = {
    "step",
    "loss",
    "balance_loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "mfu_causal",
    "mfu_full",
    "memory_bytes",
}


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


def test_a_run_reports_the_promised_keys_and_leaves_its_folder(train: Any, tmp_path: Path) -> None:
    (outcome,) = train("--json", "--out", "report.json", "--run-dir", "here")

    assert outcome.status == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["ok"] is True
    data = report["data"]
    assert set(data) >= KEYS
    assert data["layout"] == {"pp": 2, "dp": 1, "cp": 1, "ep": 1}
    folder = tmp_path / "here"
    assert Path(data["run_dir"]) == folder
    assert any(Path(data["checkpoint"]).rglob("*.safetensors"))
    assert Recipe.load(folder / "config.toml").training.steps == 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(set(line) >= METRICS for line in steps)
    assert steps[0]["loss"] == data["first_loss"]
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 2
    assert not (folder / "failures").exists()
    assert outcome.survivors == []


@pytest.mark.parametrize("site", ["data", "forward", "backward", "optimizer"])
def test_a_rank_that_raises_anywhere_ends_the_run_with_its_traceback_last(
    train: Any, site: str
) -> None:
    (outcome,) = train("--inject-fault", f"raise:{site}:1:2", "--json")

    assert outcome.status == 4, outcome.stderr
    assert f"ordered at {site} of step 2" in outcome.stderr.splitlines()[-1]
    assert "rank 1 failed at step 2" in outcome.stderr
    assert json.loads(outcome.stdout)["exit"] == 4
    assert outcome.survivors == []


def test_a_killed_rank_ends_the_run_in_one_line_with_step_and_slot(train: Any) -> None:
    (outcome,) = train("--inject-fault", "kill:backward:0:2")

    assert outcome.status == 1, outcome.stderr
    last = outcome.stderr.splitlines()[-1]
    assert "rank 0 was killed by SIGKILL at step 2, slot " in last
    assert "Traceback" not in outcome.stderr
    assert outcome.survivors == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_ends_every_rank(train: Any, number: int, status: int) -> None:
    (outcome,) = train("--set", "training.steps=5000", signal_after_step_1=number)

    assert outcome.status == status, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert ("stopped by SIGTERM" in outcome.stderr) == (number == signal.SIGTERM)
    assert outcome.survivors == []


def test_ranks_of_a_slurm_step_train_together_and_rank_0_reports(train: Any) -> None:
    first, second = train("--json", variables=slurm_step(2))

    assert (first.status, second.status) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout)["data"]["world_size"] == 2
    assert second.stdout == ""


def test_in_a_slurm_step_too_the_failing_rank_speaks_and_all_end(train: Any) -> None:
    first, second = train("--inject-fault", "raise:backward:1:2", variables=slurm_step(2))

    assert (first.status, second.status) == (4, 4), first.stderr + second.stderr
    assert "ordered at backward of step 2" in second.stderr.splitlines()[-1]
    assert "ordered" not in first.stderr
