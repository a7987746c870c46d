"""Whole runs that are stopped, starved, damaged and disturbed around their checkpoints."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pith.checkpoint.manifest import faults, read
from pith.checkpoint.shelf import Shelf
from pith.run.progress import Progress
from pith.train.fault import DELAY_S
from tests.train.conftest import processes_of_session

STEPS = 24  # so many that a signal after the second one comes before the last
# At a constant rate the first steps do not depend on how many there are to be.
STEADY: dict[str, object] = {
    "optimizer.schedule": "constant",
    "optimizer.min_lr_ratio": 0,
    "training.steps": STEPS,
    "checkpoint.every": 0,
}
SHORT = {**STEADY, "training.steps": 2}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps in metrics.jsonl, as far as they are whole."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [line for line in lines if "event" not in line]


def losses(run_dir: Path) -> list[str]:
    return [line["loss"].hex() for line in lines_of(run_dir)]


def errors_of(run: Any) -> list[str]:
    return [line for line in run.stderr.splitlines() if line.startswith("error")]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_dir_of(started: Any) -> Path:
    return Path(started.cwd / "runs" / "tiny-moe")


def until_step(step: int, started: Any) -> None:
    until(lambda: len(lines_of(run_dir_of(started))) >= step)


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def assert_verified(folder: Path) -> None:
    assert faults(folder, read(folder), checksums=True, strangers=True) == []


@pytest.fixture(scope="module")
def whole(command: Any) -> list[str]:
    """The losses of the run that nothing disturbs."""
    run = command.train(settings=STEADY)
    assert run.status == 0, run.stderr
    found = losses(run.run_dir)
    assert len(set(found)) == STEPS
    return found


@pytest.fixture(scope="module")
def short(command: Any) -> Path:
    """The folder of a run of two steps; nobody changes it."""
    run = command.train(settings=SHORT)
    assert run.status == 0, run.stderr
    return Path(run.run_dir)


@pytest.fixture
def cwd(command: Any, short: Path) -> Path:
    """A working folder with a copy of the short run."""
    folder = Path(command.folder())
    shutil.copytree(short, folder / "runs" / short.name)
    return folder


def launcher(started: Any) -> list[int]:
    return [started.process_id]


def rank_1(started: Any) -> list[int]:
    position = Progress.read(run_dir_of(started) / "failures" / "progress-1")
    assert position is not None
    return [position.pid]


SIGNALS = {
    "SIGTERM to the launcher": (signal.SIGTERM, launcher),
    "SIGUSR1 to one rank": (signal.SIGUSR1, rank_1),
}


def assert_stopped(run: Any, *, by: signal.Signals) -> int:
    """It said that it was stopped, and saved the very step after which it was; gives that step."""
    assert run.status == 75, run.stderr
    assert run.survivors == []
    report = json.loads(run.stdout)
    assert (report["ok"], report["exit"], report["error"]["code"]) == (False, 75, "run.stopped")
    step = len(lines_of(run.run_dir))
    newest = Shelf(run.run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.step == step
    assert_verified(newest.path)
    (line,) = (line for line in run.stderr.splitlines() if "stopped" in line)
    assert line.startswith(f"{newest.path}: stopped by {by.name} after step {step}, which is saved")
    assert errors_of(run) == []
    assert not (run.run_dir / "report.json").exists()
    return step


def assert_goes_on(command: Any, run: Any, whole: list[str], **settings: object) -> None:
    """The same command ends the run as if nothing had stopped it."""
    again = command.train(settings={**STEADY, **settings}, cwd=run.cwd)
    assert again.status == 0, again.stderr
    assert losses(again.run_dir) == whole, "other losses than those of the unbroken run"


@pytest.mark.parametrize("case", SIGNALS)
def test_a_signal_saves_the_very_step_and_the_same_command_goes_on_to_the_last_bit(
    command: Any, whole: list[str], case: str
) -> None:
    number, receivers = SIGNALS[case]
    started = command.start_train("--json", settings=STEADY)
    until_step(2, started)
    for process in receivers(started):
        os.kill(process, number)
    run = started.finish()

    step = assert_stopped(run, by=number)
    assert 2 <= step < STEPS
    assert checkpoints(run.run_dir) == [f"step-{step:08d}"]
    assert_goes_on(command, run, whole)


def test_signals_to_all_processes_twice_do_not_end_a_save_that_is_slow(
    command: Any, whole: list[str]
) -> None:
    settings = {"checkpoint.every": 3}
    started = command.start_train(
        "--json", "--inject-fault=delay:write:0:3", settings={**STEADY, **settings}
    )
    until_step(3, started)
    for _ in range(2):
        for process in processes_of_session(started.process_id):
            os.kill(process, signal.SIGTERM)
        time.sleep(1)
    run = started.finish()

    assert run.seconds > DELAY_S
    assert assert_stopped(run, by=signal.SIGTERM) == 4
    assert checkpoints(run.run_dir) == ["step-00000003", "step-00000004"]
    assert_goes_on(command, run, whole, **settings)


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from pith.cli.app import main
main()
"""


def test_a_checkpoint_that_does_not_fit_is_one_line_and_the_one_before_serves(
    command: Any, cwd: Path, whole: list[str]
) -> None:
    settings = {**STEADY, "training.steps": 4}
    run = command.train(settings=settings, cwd=cwd, prefix=("-c", LIMITED))

    assert run.status == 1, run.stderr
    assert run.survivors == []
    (line,) = errors_of(run)
    assert str(run.run_dir / "checkpoints" / "step-00000004.tmp") in line
    assert "File too large" in line
    assert "Traceback" not in run.stderr
    assert checkpoints(run.run_dir) == ["step-00000002"], "no half checkpoint should be left"
    assert_verified(run.run_dir / "checkpoints" / "step-00000002")
    again = command.train(settings=settings, cwd=cwd)
    assert again.status == 0, again.stderr
    assert losses(again.run_dir) == whole[:4]
    assert len(checkpoints(again.run_dir)) == 2


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_flipped_bit_is_found_in_every_file_and_refused_by_name(command: Any, cwd: Path) -> None:
    folder = cwd / "runs" / "tiny-moe" / "checkpoints" / "step-00000002"
    manifest, draw = read(folder), random.Random(8)
    assert len(manifest.files) == 3
    for number in range(21):
        entry = manifest.files[number % 3]
        place = folder / entry.name, draw.randrange(entry.size_bytes), draw.randrange(8)
        flip(*place)
        (fault,) = faults(folder, manifest, checksums=True)
        assert fault.where == str(folder / entry.name)
        flip(*place)
    assert_verified(folder)

    flip(folder / "__1_0.distcp", 12345, 3)
    run = command.train("--json", settings={**STEADY, "training.steps": 4}, cwd=cwd)
    assert run.status == 2, run.stderr
    assert run.survivors == []
    (line,) = errors_of(run)
    assert f"{folder / '__1_0.distcp'}: found sha256 " in line
    assert json.loads(run.stdout)["error"]["code"] == "checkpoint.damaged"
    assert len(lines_of(run.run_dir)) == 2, "no step should be taken"
    assert checkpoints(run.run_dir) == ["step-00000002"]


def test_a_second_job_in_the_same_folder_is_refused_and_does_not_disturb_the_first(
    command: Any, whole: list[str]
) -> None:
    first = command.start_train(settings=STEADY)
    until_step(2, first)
    held = processes_of_session(first.process_id)
    for process in held:
        os.kill(process, signal.SIGSTOP)
    try:
        second = command.train(settings=STEADY, cwd=first.cwd)
    finally:
        for process in held:
            os.kill(process, signal.SIGCONT)
    run = first.finish()

    assert second.status == 2, second.stderr
    assert 5 <= second.seconds < 10
    (line,) = errors_of(second)
    assert "another run writes to this folder" in line
    assert f"process {first.process_id} on " in line
    assert run.status == 0, run.stderr
    assert losses(run.run_dir) == whole


def test_a_save_that_fails_in_the_background_stops_the_run_within_a_step(
    command: Any, whole: list[str]
) -> None:
    settings = {"checkpoint.every": 1, "checkpoint.asynchronous": "true"}
    run = command.train("--inject-fault=raise:write:1:2", settings={**STEADY, **settings})

    assert run.status == 4, run.stderr
    assert run.survivors == []
    (line,) = errors_of(run)
    assert line.startswith("error: rank 1 failed at step 3, ")
    *_, last = run.stderr.splitlines()
    assert last == "pith.train.fault.InjectedError: ordered at write of step 2"
    assert len(lines_of(run.run_dir)) <= 3
    newest = Shelf(run.run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.step == 1
    assert_verified(newest.path)
    assert_goes_on(command, run, whole, **settings)


def test_another_layout_and_another_global_batch_go_on_in_the_order_of_samples(
    command: Any, cwd: Path, whole: list[str]
) -> None:
    settings = {"parallel.pp": 1, "training.global_batch_size": 16, "training.steps": 4}
    run = command.train("--json", "--nproc=2", settings={**STEADY, **settings}, cwd=cwd)

    assert run.status == 0, run.stderr
    assert losses(run.run_dir)[:2] == whole[:2]
    assert [line["samples"] for line in lines_of(run.run_dir)] == [8, 16, 32, 48]
    manifest = read(Path(run.data["checkpoint"]))
    assert (manifest.position.step, manifest.position.samples) == (4, 48)
    assert manifest.layout == {"pp": 1, "dp": 2, "cp": 1, "ep": 1}
    for change in ("parallel.pp 2 -> 1", "training.global_batch_size 8 -> 16"):
        assert f"resumes with {change}\n" in run.stderr
    assert run.data["first_loss"].hex() == whole[0]
