"""Pieces of a layer on their own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pith.comm.exchange import LocalExchange
from pith.layer.protocol import Context, Exchange, Parts
from pith.ops import choose


@dataclass
class Records:
    """A meter that keeps what it is told."""

    entries: list[tuple[int, list[int], float]] = field(default_factory=list)

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor) -> None:
        self.entries.append((layer, load_E.tolist(), balance_loss.item()))


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def make_parts() -> Callable[..., Parts]:
    def build(count: int, *, first: int = 0, exchange: Exchange | None = None) -> Parts:
        return Parts(choose("cpu"), exchange or LocalExchange(), None, count, first)

    return build


@pytest.fixture
def make_context(records: Records) -> Callable[..., Context]:
    """A context of sequences of this length; the angles play no part."""

    def build(length: int, *, balance_scale: float = 0.0) -> Context:
        angles_BSd = torch.zeros(1, length, 4)
        return Context(angles_BSd.cos(), angles_BSd.sin(), balance_scale, records)

    return build
