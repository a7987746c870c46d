"""Pieces of a layer on their own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pith.comm.exchange import Exchange, LocalExchange
from pith.layer.protocol import Context, Parts, RouterLosses, Routing
from pith.ops import choose


@dataclass
class Records:
    """A meter that keeps what it is told."""

    entries: list[tuple[int, list[int], float, float]] = field(default_factory=list)

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        assert not balance_loss.requires_grad
        assert not z_loss.requires_grad
        self.entries.append((layer, load_E.tolist(), balance_loss.item(), z_loss.item()))


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

    def build(
        length: int, losses: RouterLosses | None = None, routing: Routing | None = None
    ) -> Context:
        angles_BSd = torch.zeros(1, length, 4)
        cos_BSd, sin_BSd = angles_BSd.cos(), angles_BSd.sin()
        return Context(cos_BSd, sin_BSd, records, losses or RouterLosses(), routing)

    return build


@pytest.fixture
def losses_by_definition() -> Callable[..., tuple[Tensor, Tensor]]:
    """Balance and z-loss of logits [T, E], in loops over their definitions, float64.

    Each group is the tokens that P is the mean of, and the ids whose shares of experts are f.
    """

    def compute(logits_TE: Tensor, groups: list[tuple[slice, Tensor]]) -> tuple[Tensor, Tensor]:
        powers_TE, num_experts = logits_TE.double().exp(), logits_TE.shape[1]
        probs_TE = powers_TE / powers_TE.sum(1, keepdim=True)
        balance = torch.stack(
            [
                num_experts * (ids == e).double().mean() * probs_TE[tokens, e].mean()
                for tokens, ids in groups
                for e in range(num_experts)
            ]
        )
        squares = torch.stack([powers_E.sum().log() ** 2 for powers_E in powers_TE])
        return balance.sum() / len(groups), squares.mean()

    return compute
