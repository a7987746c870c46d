"""The final weights of two runs, tensor by tensor, by their canonical names."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pith.checkpoint.store import read_whole
from pith.errors import RequestError
from pith.report import Check
from pith.verify.record import Run
from pith.verify.steps import first_few
from pith.verify.tolerance import Tolerance

MODEL = "model."
CHECK = "weights"


@dataclass(frozen=True, slots=True)
class Weights:
    """What came of it. `relative` holds a figure for each tensor that both have, in model order."""

    relative: Mapping[str, float]
    limit: float
    checks: tuple[Check, ...]

    @property
    def worst(self) -> str | None:
        """The tensor that differs most; None where all are equal."""
        name = max(self.relative, key=self.relative.__getitem__, default="")
        return name if self.relative.get(name) else None

    @property
    def first(self) -> str | None:
        """The first tensor in model order that differs at all; None where all are equal."""
        return next((name for name, figure in self.relative.items() if figure), None)

    @property
    def data(self) -> dict[str, Any]:
        """For the report."""
        return {
            "tensors": len(self.relative),
            "worst": self.worst,
            "max_relative": max(self.relative.values(), default=None),
            "first": self.first,
        }


def compare_weights(a: Run, b: Run, tolerance: Tolerance) -> Weights:
    """Hold the tensors of the last checkpoints against each other, both read whole.

    With equal bits asked for, the moments of the optimizer are held against each other too. A
    checkpoint that is not there or damaged is a failed check.
    """
    limit = math.inf if tolerance.weights is None else tolerance.weights
    try:
        first, second = (read_whole(run.checkpoint.path) for run in (a, b))
    except RequestError as error:
        wanted = "two checkpoints that can be read"
        return Weights({}, limit, (Check(CHECK, False, str(error), wanted),))
    order = _model_order(a, b)
    faults = [*_name_faults(first, second, order), *_faults_of(a, first), *_faults_of(b, second)]
    both = [name for name in order if name in first and name in second]
    if limit == 0:
        both += sorted(first.keys() & second.keys() - set(both))
    same = [name for name in both if first[name].shape == second[name].shape]
    figures = {name: apart(first[name], second[name]) for name in same}
    wanted = "the same names and shapes, all finite"
    found = first_few(faults) or f"{len(first)} tensors"
    compared = Weights(figures, limit, (Check("tensors", not faults, found, wanted),))
    return Weights(figures, limit, (*compared.checks, _figure_check(compared)))


def apart(a: Tensor, b: Tensor) -> float:
    """||a - b|| by the larger norm of the two; 0 for equal bits alone, infinite for NaN."""
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return 0.0
    first, second = a.double(), b.double()
    largest = max(float(first.norm()), float(second.norm()))
    figure = float((first - second).norm()) / (largest or 1.0)
    return max(figure, math.ulp(0.0)) if math.isfinite(figure) else math.inf


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _model_order(*runs: Run) -> list[str]:
    """The weights that the models have, in model order."""
    specs = (spec for run in runs for spec in run.recipe.architecture.parameters())
    return list(dict.fromkeys(MODEL + spec.name for spec in specs))


def _name_faults(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], order: Iterable[str]
) -> Iterator[str]:
    for name in dict.fromkeys((*order, *sorted(first.keys() | second.keys()))):
        shapes = [tuple(t[name].shape) if name in t else None for t in (first, second)]
        if shapes[0] != shapes[1] or shapes[0] is None:
            mine, its = ("missing" if s is None else str(list(s)) for s in shapes)
            yield f"{name}: {mine} against {its}"


def _faults_of(run: Run, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            yield f"{name}: not finite in {run.label}"


def _figure_check(weights: Weights) -> Check:
    """Whether every tensor is close enough; the first and the worst that are not, by name."""
    figures, limit = weights.relative, weights.limit
    beyond = [name for name, figure in figures.items() if not figure <= limit]
    infinite = [name for name, figure in figures.items() if math.isinf(figure)]
    wanted = "equal" if limit == 0 else f"within {limit:g}" if math.isfinite(limit) else "finite"
    worst, first = weights.worst, weights.first
    told = f"at most {figures[worst]:.1e}, {worst}" if worst else "equal"
    if worst and first != worst:
        told += f"; the first that differs is {first}"
    count = f"{len(beyond)} of {len(figures)} tensors differ: " if beyond else ""
    is_held = bool(figures) and not beyond and not infinite
    return Check(CHECK, is_held, count + told if figures else "no tensor", wanted)
