"""Operators by name and implementation, with the tolerance that each element type allows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.engine.weight_grads import WeightGrads
from pith.ops import choose


@pytest.fixture
def operator() -> Callable[[str, str], Callable[..., Any]]:
    """operator("linear", "library") -> the function, through the production choice."""

    def find(name: str, implementation: str = "reference") -> Callable[..., Any]:
        return getattr(choose("cpu", {name: implementation}), name)

    return find


@pytest.fixture
def sink() -> WeightGrads:
    return WeightGrads()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def assert_near() -> Callable[[Tensor, Tensor, float], None]:
    """All finite, equal in shape, and ||found - wanted|| <= tolerance * ||wanted||."""

    def check(found: Tensor, wanted: Tensor, tolerance: float) -> None:
        assert found.shape == wanted.shape
        assert found.isfinite().all()
        error = (found.double() - wanted.double()).norm().item()
        assert error <= tolerance * wanted.double().norm().item(), error

    return check


@pytest.fixture
def poisoned_memory() -> Callable[[int], None]:
    """poisoned_memory(n): freed memory of n float64 elements is full of NaN."""

    def poison(num_elements: int) -> None:
        for _ in range(4):
            blocks = [torch.full((num_elements,), float("nan")) for _ in range(4)]
            blocks += [torch.full((num_elements,), float("nan"), dtype=torch.float64)]
            del blocks

    return poison
