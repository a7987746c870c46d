"""One model that is checked, and how a check of it is written down."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pith
from pith.arch import Architecture
from pith.errors import PithError
from pith.report import Check

PACKAGE = Path(pith.__file__).parent


@dataclass(frozen=True, slots=True)
class Subject:
    """A config under the name that its checks go by."""

    name: str  # "qwen3/moe-tied", or a recipe
    config: Mapping[str, Any]
    architecture: Architecture

    def check(self, promise: str, ok: bool, *, found: str, wanted: str, where: str) -> Check:
        """The outcome of one promise. `where` is the file to open when it failed."""
        return Check(f"{self.name}: {promise}", ok, found, wanted, where)

    @property
    def facts_file(self) -> str:
        """The file of the family's facts."""
        return source_of(self.architecture)

    def run(self, promise: str, checks: Callable[["Subject"], Iterable[Check]]) -> Iterator[Check]:
        """What `checks` gives; where code of pith raises on the way, a check that failed.

        Raises PithError as it is: what cannot be checked is not a failed check.
        """
        try:
            yield from checks(self)
        except PithError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            wanted = f"the model of {self.facts_file} to run"
            yield self.check(promise, False, found=found, wanted=wanted, where=_origin(error))


def source_of(value: object) -> str:
    """The file of the class of `value`: "pith/models/qwen3.py"."""
    return type(value).__module__.replace(".", "/") + ".py"


def distance(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||.

    Infinite where a shape differs, a value is not finite, or only `wanted` is zero.
    """
    if found.shape != wanted.shape:
        return inf
    error, size = float(torch.dist(found.double(), wanted.double())), float(wanted.double().norm())
    if not isfinite(error) or not isfinite(size):
        return inf
    if size == 0:
        return inf if error else 0.0
    return error / size


def some(names: Iterable[str]) -> str:
    """The first of `names` in words, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return ", ".join(listed[:4]) + more


def _origin(error: Exception) -> str:
    """The line of pith, not of its checks, that an exception came from or through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "verify"):
            return f"{path.relative_to(PACKAGE.parent)}:{frame.lineno}"
    return "pith/verify"
