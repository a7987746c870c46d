"""Tokens to the ranks that hold their experts, and their gradients back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pith.comm.exchange import Pending
from pith.layer.balance import count_pairs
from pith.layer.protocol import Parts, Received, Routed

Launch = Callable[[Tensor], Pending[Tensor]]


def dispatch(routed: Routed, parts: Parts) -> Pending[Received]:
    """Launch the exchange of tokens, expert ids and weights of a layer with experts."""
    assert routed.ids_TK is not None, "a layer without experts has nothing to dispatch"
    assert routed.weights_TK is not None, "expert ids come with weights"
    gather, reduce = parts.exchange.gather_tokens, parts.exchange.reduce_tokens
    return _Arriving(
        move(routed.tokens_TD, gather, reduce),
        gather(routed.ids_TK),
        move(routed.weights_TK, gather, reduce),
        parts,
    )


def dispatch_backward(
    tokens_RD: Tensor, weights_RK: Tensor | None, parts: Parts
) -> Pending[tuple[Tensor, Tensor | None]]:
    """Launch the way back of the gradients of what `dispatch` brought."""
    assert weights_RK is not None, "a layer with experts sends a gradient to its weights"
    reduce = parts.exchange.reduce_tokens
    return _Returning(reduce(tokens_RD), reduce(weights_RK))


def move(x: Tensor, launch: Launch, launch_backward: Launch) -> Pending[Tensor]:
    """Launch one exchange of `x`, differentiable if autograd follows `x`."""
    return _Moving(x, launch(x.detach()), launch_backward)


@dataclass(frozen=True, slots=True)
class _Moving:
    x: Tensor
    pending: Pending[Tensor]
    launch_backward: Launch

    def wait(self) -> Tensor:
        if not (torch.is_grad_enabled() and self.x.requires_grad):
            return self.pending.wait()
        inputs = (self.x, self.pending, self.launch_backward)
        return cast(Tensor, _Move.apply(*inputs))  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending[Tensor], launch_backward: Launch) -> Tensor:
        ctx.launch_backward = launch_backward
        return pending.wait().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.launch_backward(grads[0]).wait(), None, None


@dataclass(frozen=True, slots=True)
class _Arriving:
    tokens: Pending[Tensor]
    ids: Pending[Tensor]
    weights: Pending[Tensor]
    parts: Parts

    def wait(self) -> Received:
        ids_RK = self.ids.wait()
        counts_e = count_pairs(
            ids_RK.flatten(),
            first_expert=self.parts.first_expert,
            num_experts=self.parts.num_local_experts,
        )
        return Received(self.tokens.wait(), ids_RK, self.weights.wait(), counts_e)


@dataclass(frozen=True, slots=True)
class _Returning:
    tokens: Pending[Tensor]
    weights: Pending[Tensor]

    def wait(self) -> tuple[Tensor, Tensor | None]:
        return self.tokens.wait(), self.weights.wait()
