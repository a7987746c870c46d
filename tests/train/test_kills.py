"""kill -9 of a whole job, or of one rank below torchrun: the same command goes on to the bit."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pith.checkpoint.manifest import faults
from pith.checkpoint.shelf import Found, Shelf
from pith.run.job import Job
from pith.run.metrics import read_steps
from pith.run.progress import Progress
from tests.train.conftest import processes_of_session

EVERY, STEPS = 2, 16
SAVING = {
    "training.steps": STEPS,
    "checkpoint.every": EVERY,
    "checkpoint.keep": 2,
}
ASYNCHRONOUS = {**SAVING, "checkpoint.asynchronous": "true"}
RUN_DIR = Path("runs", "tiny-moe")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PATIENCE_S = 50.0


@pytest.fixture(scope="module")
def whole(command: Any) -> list[dict[str, Any]]:
    """The steps of a run that nobody killed."""
    run = command.train(settings=SAVING)
    assert run.status == 0, run.stderr
    steps = measured(run.run_dir)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    return steps


def test_a_job_killed_at_any_time_and_again_in_a_save_goes_on_to_the_last_bit(
    command: Any, whole: list[dict[str, Any]]
) -> None:
    cwd, draw = command.folder(), random.Random(0)
    shelf, seen = Shelf(cwd / RUN_DIR / "checkpoints"), draw.randint(3, 5)

    def is_trained() -> bool:
        return num_steps(cwd / RUN_DIR) >= seen

    first = live_and_die(command, cwd, SAVING, once=is_trained, later_s=draw.uniform(0, 0.05))
    assert first.step is not None
    begun = shelf.temporary(first.step + EVERY)

    def is_begun() -> bool:
        has_resumed = bool(events(cwd / RUN_DIR, "resumed"))
        return has_resumed and begun.is_dir() and not list(begun.glob("*"))

    # Rank 1 hangs, so that rank 0 has made the folder and waits.
    fault = f"--inject-fault=hang:write:1:{first.step + EVERY}"
    again = live_and_die(command, cwd, SAVING, fault, once=is_begun, later_s=0.1)
    assert again.step == first.step
    assert list(begun.iterdir()) == []

    ends_like(whole, command, cwd, SAVING, resumed_at=first.step, skipped=begun)


def test_a_job_killed_while_it_commits_in_the_background_goes_on_to_the_last_bit(
    command: Any, whole: list[dict[str, Any]]
) -> None:
    cwd, hung = command.folder(), 6
    shelf = Shelf(cwd / RUN_DIR / "checkpoints")
    draft = shelf.temporary(hung)

    def is_written_and_trained_on() -> bool:
        return (draft / ".metadata").exists() and num_steps(cwd / RUN_DIR) == hung + EVERY

    fault = f"--inject-fault=hang:commit:0:{hung}"
    newest = live_and_die(command, cwd, ASYNCHRONOUS, fault, once=is_written_and_trained_on)
    assert newest.step == hung - EVERY
    names = {path.name for path in draft.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}, "all but its manifest is there"

    ends_like(whole, command, cwd, ASYNCHRONOUS, resumed_at=hung - EVERY, skipped=draft)


def test_torchrun_restarts_ranks_of_which_one_was_killed_and_they_resume_to_the_last_bit(
    command: Any, whole: list[dict[str, Any]]
) -> None:
    cwd = command.folder()
    shelf = Shelf(cwd / RUN_DIR / "checkpoints")
    prefix = (*TORCHRUN, "--max-restarts=2", "-m", "pith.cli")
    started = command.start_train("--json", settings=SAVING, cwd=cwd, prefix=prefix)
    until(lambda: shelf.newest() is not None)
    position = Progress.read(Job("", "", str(cwd / RUN_DIR)).progress_path(1))
    assert position is not None
    os.kill(position.pid, signal.SIGKILL)
    run = started.finish()

    assert run.status == 0, run.stderr
    assert run.survivors == []
    (resumed,) = events(run.run_dir, "resumed")
    assert EVERY <= resumed["step"] < STEPS
    assert measured(run.run_dir) == whole
    failed, ended = map(json.loads, run.stdout.splitlines())  # rank 0 reports in each life
    assert (failed["ok"], ended["ok"], ended["data"]["steps"]) == (False, True, STEPS)


def live_and_die(
    command: Any,
    cwd: Path,
    settings: Mapping[str, object],
    *options: str,
    once: Callable[[], bool],
    later_s: float = 0.0,
) -> Found:
    """Train until `once` holds, kill the whole job, and give the newest checkpoint it left."""
    started = command.start_train(*options, settings=settings, cwd=cwd)
    try:
        until(once)
        time.sleep(later_s)
    finally:
        os.killpg(started.process_id, signal.SIGKILL)
    until(lambda: not processes_of_session(started.process_id))  # a kill takes its time
    run = started.finish()
    assert run.status == -signal.SIGKILL, run.stderr
    newest = Shelf(cwd / RUN_DIR / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest is not None
    assert faults(newest.path, newest.manifest, checksums=True, strangers=True) == []
    return newest


def ends_like(
    whole: list[dict[str, Any]],
    command: Any,
    cwd: Path,
    settings: Mapping[str, object],
    *,
    resumed_at: int,
    skipped: Path,
) -> None:
    """The same command ends the run, which is the unbroken one; of `skipped` it tells."""
    run = command.train(settings=settings, cwd=cwd)
    assert run.status == 0, run.stderr
    assert events(run.run_dir, "resumed")[-1]["step"] == resumed_at
    assert f"skipped {skipped}" in run.stderr
    assert not list(skipped.parent.glob("*.tmp"))
    assert measured(run.run_dir) == whole


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.001)


def num_steps(run_dir: Path) -> int:
    return len(read_steps(run_dir / "metrics.jsonl"))


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """What must not differ of each step, floats as hex."""
    names = ("step", "loss", "grad_norm", "lr", "samples", "sample_digest")
    return [
        {name: v.hex() if isinstance(v := line[name], float) else v for name in names}
        for line in read_steps(run_dir / "metrics.jsonl")
    ]
