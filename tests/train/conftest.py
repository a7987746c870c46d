"""Whole runs of `pith train` with a micro recipe, each in a session of its own.

Most are forked from the test process, where torch is imported already, and call the console
script; `separate` ones start an interpreter.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pith.cli import app
from pith.config import Recipe
from pith.data.tokenize import tokenize

# Every sequence is nearly the same, so that the loss falls within a few steps.
DOCUMENT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
DEADLINE_S = 60.0
OUTER = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
MICRO: Mapping[str, object] = {
    "model.fields.hidden_size": 32,
    "model.fields.num_hidden_layers": 4,
    "model.fields.num_attention_heads": 4,
    "model.fields.num_key_value_heads": 2,
    "model.fields.head_dim": 8,
    "model.fields.moe_intermediate_size": 16,
    "model.fields.num_experts": 4,
    "parallel.ep": 1,
    "data.validation": 0.2,
    "training.steps": 4,
    "training.sequence_length": 32,
    "training.global_batch_size": 8,
    "training.micro_batch_size": 1,
    "optimizer.lr": 1e-2,
    "optimizer.warmup_steps": 1,
    "validation.num_sequences": 3,
}


@dataclass(frozen=True)
class Run:
    """How one command ended; `survivors` are processes of its session that outlived it."""

    status: int
    stdout: str
    stderr: str
    cwd: Path
    seconds: float
    ended: float
    survivors: list[int]

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.stdout)["data"]
        return data

    @property
    def run_dir(self) -> Path:
        """The only run folder below the working folder."""
        (path,) = (self.cwd / "runs").iterdir()
        return path

    @property
    def seconds_after_last_step(self) -> float:
        """From the last step that was written down to the end of the command."""
        return self.ended - (self.run_dir / "metrics.jsonl").stat().st_mtime


@dataclass(frozen=True)
class Started:
    """A command on its way; what it prints goes to files in `output`."""

    process_id: int
    wait: Callable[[], int]
    cwd: Path
    output: Path
    begun: float

    def finish(self) -> Run:
        try:
            status = self.wait()
        except BaseException:
            for number in processes_of_session(self.process_id):
                os.kill(number, signal.SIGKILL)
            raise
        ended = time.time()
        return Run(
            status=status,
            stdout=(self.output / "stdout").read_text(),
            stderr=(self.output / "stderr").read_text(),
            cwd=self.cwd,
            seconds=ended - self.begun,
            ended=ended,
            survivors=processes_of_session(self.process_id),
        )


class CommandLine:
    """Runs commands, each in a new working folder unless told otherwise, below `base`."""

    def __init__(self, base: Path, corpus: Path) -> None:
        self._base = base
        self.corpus = corpus

    def folder(self) -> Path:
        """A new and empty folder."""
        path = self._base / f"folder-{len(list(self._base.iterdir()))}"
        path.mkdir()
        return path

    def sets(self, settings: Mapping[str, object]) -> list[str]:
        """Options for the micro recipe with `settings` on top."""
        values = {**MICRO, "data.corpus": self.corpus, **settings}
        return [f"--set={name}={value}" for name, value in values.items()]

    def recipe(self, settings: Mapping[str, object] | None = None) -> Recipe:
        """What `train` with these settings trains."""
        texts = [option.removeprefix("--set=") for option in self.sets(settings or {})]
        return Recipe.load("tiny-moe", texts)

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] | None = None,
        cores: int | None = None,
    ) -> Started:
        """Start `pith` with `words`; with `prefix` in an interpreter that gets that first."""
        cwd, output, begun = cwd or self.folder(), self.folder(), time.time()
        if prefix is None:
            started = _fork(words, cwd, output, variables or {}, cores)
        else:
            started = _spawn([*prefix, *words], cwd, output, variables or {})
        return Started(*started, cwd, output, begun)

    def start_train(
        self, *options: str, settings: Mapping[str, object] | None = None, **how: Any
    ) -> Started:
        """Start `pith train` with the micro recipe; `how` is that of `start`."""
        words = ["train", "--device=cpu", *self.sets(settings or {}), *options]
        return self.start(words, **how)

    def train(self, *options: str, **how: Any) -> Run:
        """Run `pith train` to its end; `how` is that of `start_train`."""
        return self.start_train(*options, **how).finish()


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    for room in ("pith.launch.elastic", "pith.train.loop"):
        importlib.import_module(room)  # once here, not in every command that is forked
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": DOCUMENT}) + "\n" for _ in range(10)))
    tokenize([str(texts)], out=folder / "tokens", workers=1)
    return CommandLine(tmp_path_factory.mktemp("commands"), folder / "tokens")


def _spawn(
    words: Sequence[str], cwd: Path, output: Path, variables: Mapping[str, str]
) -> tuple[int, Callable[[], int]]:
    inherited = {name: value for name, value in os.environ.items() if name not in OUTER}
    with (output / "stdout").open("w") as out, (output / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=out,
            stderr=err,
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        )
    return process.pid, lambda: process.wait(DEADLINE_S)


def _fork(*arguments: Any) -> tuple[int, Callable[[], int]]:
    process = multiprocessing.get_context("fork").Process(target=_console_script, args=arguments)
    process.start()

    def wait() -> int:
        process.join(DEADLINE_S)
        assert process.exitcode is not None, f"still running after {DEADLINE_S} s"
        return process.exitcode

    assert process.pid is not None
    return process.pid, wait


def _console_script(
    words: Sequence[str],
    cwd: Path,
    output: Path,
    variables: Mapping[str, str],
    cores: int | None,
) -> None:
    os.setsid()
    os.chdir(cwd)
    sys.stdout, sys.stderr = (output / "stdout").open("w"), (output / "stderr").open("w")
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(stream.fileno(), number)
    for name in OUTER:
        os.environ.pop(name, None)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    sys.argv = ["pith", *words]
    app.main()


def processes_of_session(session: int) -> list[int]:
    """What still runs in `session`, zombies aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(own) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found
