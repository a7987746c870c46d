"""Operators by name and implementation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
