"""Stages that write down each piece of work, with numbers that autograd can check."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.comm.exchange import Ready
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Carry, Received, Routed


@dataclass
class Journal:
    """What happened, in order: "F attend.0", "launch B combine.1", "wait F dispatch.0"."""

    entries: list[str] = field(default_factory=list)
    grad_modes: set[bool] = field(default_factory=set)  # that pieces were called in

    def note(self, *words: str) -> None:
        self.entries.append(" ".join(words))


class Piece:
    """y = weight * x. Its weight gradient goes to the sink, or to autograd without one."""

    def __init__(self, name: str, journal: Journal, sink: WeightGrads | None) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        drawn = 0.5 + torch.rand(3, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter(drawn)
        self.name, self.journal, self.sink = name, journal, sink

    def __call__(self, x: Tensor) -> Tensor:
        self.journal.grad_modes.add(torch.is_grad_enabled())
        return x * self.weight if self.sink is None else _Multiply.apply(x, self.weight, self)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, piece: Piece) -> Tensor:
        ctx.x, ctx.piece = x.detach(), piece
        piece.journal.note("F", piece.name)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        piece, x = ctx.piece, ctx.x

        def accumulate(main: Tensor) -> None:
            piece.journal.note("W", piece.name)
            main += (x * dy).flatten(0, -2).sum(0)

        piece.journal.note("I", piece.name)
        piece.sink.defer(piece.weight, accumulate)
        return dy * piece.weight, None, None


@dataclass
class Flying:
    """A communication that is noted where it is launched and where it is waited for."""

    value: Any
    name: str
    journal: Journal

    def __post_init__(self) -> None:
        self.journal.note("launch", self.name)

    def wait(self) -> Any:
        self.journal.note("wait", self.name)
        return self.value


class FakeLayer:
    """A routed layer whose tokens all go to one expert, or a dense one that does not yield."""

    def __init__(
        self, number: int, *, routed: bool, journal: Journal, sink: WeightGrads | None
    ) -> None:
        self.number, self.communicates, self.journal = number, routed, journal
        self.attention, self.mlp, self.summing = (
            Piece(f"{name}.{number}", journal, sink) for name in ("attend", "experts", "aggregate")
        )

    def attend(self, carry: Carry, context: Any) -> Routed:
        tokens_TD = self.attention(carry.hidden_BSD).flatten(0, 1)
        if not self.communicates:
            return Routed(tokens_TD, carry)
        ids_TK = torch.zeros(len(tokens_TD), 1, dtype=torch.int64)
        return Routed(tokens_TD, carry, ids_TK, tokens_TD.sum(1, keepdim=True))

    def dispatch(self, routed: Routed) -> Any:
        received = Received(
            routed.tokens_TD, routed.ids_TK, routed.weights_TK, route=self._own_route()
        )
        return self._move("F dispatch", received)

    def dispatch_backward(self, tokens_RD: Tensor, weights_RK: Tensor | None, route: Any) -> Any:
        assert route is self._own_route(), "the way back is that of another layer"
        return self._move("B dispatch", (tokens_RD, weights_RK))

    def experts(self, received: Received) -> Tensor:
        partial_RD = self.mlp(received.tokens_RD)
        return partial_RD if received.weights_RK is None else partial_RD * received.weights_RK

    def combine(self, partial_RD: Tensor, route: Any) -> Any:
        assert route is self._own_route(), "the way back is that of another layer"
        return self._move("F combine", partial_RD)

    def combine_backward(self, summed_TD: Tensor, route: Any) -> Any:
        assert route is self._own_route(), "the way back is that of another layer"
        return self._move("B combine", summed_TD)

    def aggregate(self, summed_TD: Tensor, residual: Carry) -> Carry:
        hidden_BSD = residual.hidden_BSD
        return Carry(self.summing(summed_TD.view_as(hidden_BSD)) + hidden_BSD)

    def forward(self, carry: Carry, context: Any) -> Carry:
        routed = self.attend(carry, context)
        partial_RD = self.experts(self.dispatch(routed).wait())
        return self.aggregate(self.combine(partial_RD, self._own_route()).wait(), routed.residual)

    def _own_route(self) -> Any:
        return self if self.communicates else None

    def _move(self, what: str, value: Any) -> Any:
        return (
            Flying(value, f"{what}.{self.number}", self.journal)
            if self.communicates
            else Ready(value)
        )


class FakeStage:
    """Layers `kinds` numbered from `first`: M is routed, d is dense."""

    def __init__(
        self,
        kinds: str,
        *,
        first: int,
        is_first: bool,
        is_last: bool,
        journal: Journal,
        sink: WeightGrads | None,
    ) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.entrance, self.exit = (Piece(name, journal, sink) for name in ("enter", "leave"))
        self.layers = {
            str(number): FakeLayer(number, routed=kind == "M", journal=journal, sink=sink)
            for number, kind in enumerate(kinds, start=first)
        }

    def embed(self, tokens_BS: Tensor) -> Carry:
        return Carry(self.entrance(tokens_BS.double()[..., None].expand(-1, -1, 3)))

    def loss(self, carry: Carry, labels_BS: Tensor) -> Tensor:
        return (self.exit(carry.hidden_BSD) * labels_BS[..., None]).sum()

    def weights(self) -> dict[str, Tensor]:
        pieces = [self.entrance] * self.is_first + [self.exit] * self.is_last
        for layer in self.layers.values():
            pieces += [layer.attention, layer.mlp, layer.summing]
        return {piece.name: piece.weight for piece in pieces}


def stages(kinds: str, journal: Journal, sink: WeightGrads | None) -> list[FakeStage]:
    """Stages of a model; MM/d is two of them, of two routed layers and of one dense layer."""
    parts = kinds.split("/")
    return [
        FakeStage(
            part,
            first=sum(len(before) for before in parts[:index]),
            is_first=index == 0,
            is_last=index == len(parts) - 1,
            journal=journal,
            sink=sink,
        )
        for index, part in enumerate(parts)
    ]


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def make_stages() -> Any:
    return stages
