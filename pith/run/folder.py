"""The run folder: where one run keeps everything it writes.

config.toml        the resolved recipe, loads back
environment.json   code, versions, devices
metrics.jsonl      one object a step, and events
trace/             the executed order
checkpoints/       what is saved
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from pith.errors import RequestError
from pith.report import finite
from pith.run.environment import run_environment

DEFAULT_DIRECTORY = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder. `notice` is a line for the user when the plain name was taken."""

    path: Path
    notice: str = ""

    @classmethod
    def create(
        cls,
        directory: Path,
        recipe_name: str,
        *,
        recipe_toml: str,
        facts: Mapping[str, object] | None = None,
    ) -> Self:
        """Make `directory`/`recipe_name`, or the first free of NAME-2, NAME-3 and so on.

        One process calls it. An earlier run is never touched. `facts` go into environment.json:
        what only the caller knows, such as the world size. Raises RequestError when the folder
        cannot be made.
        """
        assert Path(recipe_name).name == recipe_name, recipe_name
        try:
            path = _make_free_folder(directory, recipe_name)
            (path / "config.toml").write_text(recipe_toml, encoding="utf-8")
            environment = finite({**run_environment(), **(facts or {})})
            (path / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
        except OSError as error:
            raise RequestError(
                "run.folder",
                what="the run folder cannot be made",
                found=error.strerror or str(error),
                wanted="a folder that can be written",
                where=str(error.filename or directory),
                next_step="name another one with --run-dir, or in log.directory",
            ) from error
        plain = directory / recipe_name
        notice = "" if path == plain else f"{plain} holds an earlier run; this one is {path}"
        return cls(path, notice)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def _make_free_folder(directory: Path, name: str) -> Path:
    """Make the folder whose name is free; two runs that start together get two folders."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = directory / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            continue
        return path
    raise AssertionError
