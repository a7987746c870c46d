"""Tokens to the ranks that hold their experts, and their gradients back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pith.comm.exchange import Pending, Route, Rows
from pith.layer.balance import count_pairs
from pith.layer.protocol import Parts, Received, Routed

Launch = Callable[..., Pending[Rows]]


def dispatch(routed: Routed, parts: Parts) -> Pending[Received]:
    """Launch the exchange of tokens, expert ids and weights of a layer with experts."""
    assert routed.ids_TK is not None, "a layer without experts has nothing to dispatch"
    assert routed.weights_TK is not None, "expert ids come with weights"
    ids_TK, rows = routed.ids_TK, (routed.tokens_TD, routed.weights_TK, routed.ids_TK)
    route = parts.stopwatch.call("route", lambda: parts.exchange.route(ids_TK))
    moving = move(rows, "dispatch", route.gather_tokens, route.reduce_tokens, parts)
    return _Arriving(moving, route, parts)


def dispatch_backward(
    tokens_RD: Tensor, weights_RK: Tensor | None, route: Route, parts: Parts
) -> Pending[tuple[Tensor, Tensor | None]]:
    """Launch the way back of the gradients of what `dispatch` brought."""
    assert weights_RK is not None, "a layer with experts sends a gradient to its weights"
    grads = (tokens_RD, weights_RK)
    pending = parts.stopwatch.launch("dispatch-backward", lambda: route.reduce_tokens(*grads))
    return cast(Pending[tuple[Tensor, Tensor | None]], pending)


def move(
    rows: Rows, phase: str, launch: Launch, launch_backward: Launch, parts: Parts
) -> Pending[Rows]:
    """Launch one exchange of `rows`, differentiable if autograd follows any of them."""
    pending = parts.stopwatch.launch(phase, lambda: launch(*(x.detach() for x in rows)))
    return _Moving(rows, pending, launch_backward)


@dataclass(frozen=True, slots=True)
class _Moving:
    rows: Rows
    pending: Pending[Rows]
    launch_backward: Launch

    def wait(self) -> Rows:
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in self.rows)):
            return self.pending.wait()
        inputs = (self.pending, self.launch_backward, *self.rows)
        return cast(Rows, _Move.apply(*inputs))  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending[Rows], launch_backward: Launch, *rows: Tensor) -> Rows:
        ctx.launch_backward = launch_backward
        moved = tuple(x.detach() for x in pending.wait())
        ctx.carries = [x.is_floating_point() for x in moved]
        ctx.mark_non_differentiable(*(x for x in moved if not x.is_floating_point()))
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        floating = [grad for grad, carries in zip(grads, ctx.carries, strict=True) if carries]
        moved = iter(ctx.launch_backward(*floating).wait())
        return None, None, *(next(moved) if carries else None for carries in ctx.carries)


@dataclass(frozen=True, slots=True)
class _Arriving:
    moving: Pending[Rows]
    route: Route
    parts: Parts

    def wait(self) -> Received:
        tokens_RD, weights_RK, ids_RK = self.moving.wait()
        counts_e = count_pairs(
            ids_RK.flatten(),
            first_expert=self.parts.first_expert,
            num_experts=self.parts.num_local_experts,
        )
        return Received(tokens_RD, ids_RK, weights_RK, counts_e, self.route)
