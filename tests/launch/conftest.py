import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def run_in_session(command: list[str], **variables: str) -> Outcome:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
    )
    stdout, stderr = process.communicate(timeout=120)
    return Outcome(process.returncode, stdout, stderr, processes_of_session(process.pid))


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a function of fake_training on three processes."""

    def run(name: str, *, timeout_s: float = 60) -> Outcome:
        script = Path(__file__).with_name("run_fake.py")
        return run_in_session([sys.executable, str(script), name, str(tmp_path), str(timeout_s)])

    return run
