import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    """How a job in a session of its own ended, and which of its processes outlived it."""

    status: int
    stdout: str
    stderr: str
    survivors: list[int]


def processes_of_session(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def start(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    outer = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=inherited | variables | {"OMP_NUM_THREADS": "1"},
    )


def signalled(process: subprocess.Popen[str], number: int, *, after: str) -> Outcome:
    """Send a signal to the process itself once a line with `after` stands on its stderr."""
    assert process.stderr is not None
    for line in process.stderr:
        if after in line:
            process.send_signal(number)
            break
    return finish(process)


def finish(process: subprocess.Popen[str]) -> Outcome:
    stdout, stderr = process.communicate(timeout=200)
    return Outcome(process.returncode, stdout, stderr, processes_of_session(process.pid))


@dataclass(frozen=True)
class Ended:
    """How a fake training ended: what was said of it, and how long it took without the imports."""

    status: int
    summary: Any
    seconds: float
    stderr: str


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every training of fake_training.py that goes wrong by itself, on three processes."""
    return run_fakes(tmp_path_factory.mktemp("fakes"), asked=False)


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every training of fake_training.py that is asked to stop, on three processes."""
    return run_fakes(tmp_path_factory.mktemp("asked"), asked=True)


def run_fakes(folder: Path, *, asked: bool) -> dict[str, Ended]:
    """Run them one after another; none of their processes outlives its job."""
    script = Path(__file__).with_name("run_fake.py")
    text = script.with_name("fake_training.py").read_text()
    names = re.findall(r"^def ([a-z]\w*)", text, flags=re.MULTILINE)
    names = [name for name in names if name.startswith("asked") == asked]
    outcome = finish(start([sys.executable, str(script), str(folder), *names], folder, {}))
    assert outcome.status == 0, outcome.stderr
    assert outcome.survivors == []
    said = re.split(r"^== \w+\n", outcome.stderr, flags=re.MULTILINE)[1:]
    lines = [json.loads(line) for line in outcome.stdout.splitlines()]
    return {
        line.pop("name"): Ended(**line, stderr=stderr)
        for line, stderr in zip(lines, said, strict=True)
    }


# A run of two steps, small in every way but whole.
SMALL = {
    "parallel.ep": 1,
    "training.steps": 2,
    "training.global_batch_size": 4,
    "training.micro_batch_size": 1,
    "training.sequence_length": 32,
    "optimizer.schedule": "wsd",
    "optimizer.warmup_steps": 1,
    "optimizer.decay_steps": 1,
    "validation.num_sequences": 4,
}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Runs `pith train` with a small recipe, once for each set of variables, side by side."""

    def run(
        *options: str,
        variables: tuple[dict[str, str], ...] = ({},),
        signal_after_step_1: int | None = None,
    ) -> list[Outcome]:
        values = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "pith.cli", "train", "--device", "cpu", *values, *options]
        processes = [start(command, tmp_path, v) for v in variables]
        if signal_after_step_1 is not None:
            return [signalled(p, signal_after_step_1, after="  loss") for p in processes]
        return [finish(process) for process in processes]

    return run
