"""Run folders to compare: real ones, made once, and copies to break."""

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pith.cli import app

SETTINGS = {
    "model.fields.hidden_size": 32,
    "model.fields.num_hidden_layers": 2,
    "model.fields.num_attention_heads": 4,
    "model.fields.num_key_value_heads": 2,
    "model.fields.head_dim": 8,
    "model.fields.moe_intermediate_size": 16,
    "model.fields.num_experts": 4,
    "parallel.pp": 1,
    "parallel.ep": 1,
    "training.steps": 6,
    "training.sequence_length": 32,
    "training.global_batch_size": 4,
    "optimizer.warmup_steps": 1,
    "validation.num_sequences": 3,
    "validation.every": 3,
    "checkpoint.every": 0,
}
Lines = list[dict[str, Any]]


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one recipe in float32: the second adds up larger micro-batches."""
    folder = tmp_path_factory.mktemp("runs")
    variants = {"plain": 1, "larger": 2}
    trainings = [
        multiprocessing.get_context("fork").Process(target=_train, args=(folder / name, size))
        for name, size in variants.items()
    ]
    for training in trainings:  # one after the other, on as many cores as there may be
        training.start()
        training.join(120)
        assert training.exitcode == 0, f"it ended with {training.exitcode}"
    return folder / "plain", folder / "larger"


def _train(run: Path, micro_batch_size: int) -> None:
    """Be a `pith train` in a session of its own."""
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"
    told = run.with_suffix(".log").open("w")
    os.dup2(told.fileno(), 2)
    values = {**SETTINGS, "training.micro_batch_size": micro_batch_size}
    words = [f"--set={key}={value}" for key, value in values.items()]
    sys.exit(app.run(["train", "--device=cpu", f"--run-dir={run}", *words]))


@pytest.fixture
def plain(real_runs: tuple[Path, Path]) -> Path:
    """A whole run that no test changes."""
    return real_runs[0]


@pytest.fixture
def twin(plain: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return shutil.copytree(plain, tmp_path / "twin")


@pytest.fixture
def edit() -> Callable[[Path, Callable[[Lines], object]], None]:
    """Call `edit(run, change)`: change(steps) changes the steps of metrics.jsonl in place.

    Events keep their place at the end.
    """

    def edit(run: Path, change: Callable[[Lines], object]) -> None:
        path = run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in lines if "event" not in line]
        change(steps)
        lines = steps + [line for line in lines if "event" in line]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit
