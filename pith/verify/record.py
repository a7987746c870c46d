"""One run as its folder tells it: recipe, environment, steps, and whether all of that is whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pith.config import Recipe
from pith.report import Check


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder. Nothing in `steps` and `validations` is to be trusted before `checks` held."""

    label: str
    path: Path
    recipe: Recipe
    environment: Mapping[str, Any]
    steps: tuple[dict[str, Any], ...]  # of metrics.jsonl, as written
    validations: Mapping[int, Any]  # loss by step

    def checks(self) -> tuple[Check, ...]:
        """Whether the run is whole and all that it tells is finite."""
        return ()


def read_run(path: Path, *, label: str) -> Run:
    """The run in the folder `path`. Raises RequestError where that is no run folder."""
    raise NotImplementedError(json, path, label)
