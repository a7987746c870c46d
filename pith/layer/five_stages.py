"""A pre-norm decoder layer as five stages: what the layers of all families have in common."""

from typing import cast

import torch
from torch import Tensor, nn

from pith.comm.exchange import Pending, Ready, Route
from pith.layer.combine import combine, combine_backward
from pith.layer.dispatch import dispatch, dispatch_backward
from pith.layer.experts import DenseMlp, MixtureOfExperts
from pith.layer.protocol import Carry, Context, Parts, Received, Routed
from pith.layer.weights import RMSNorm


class DecoderLayer(nn.Module):
    """Attention, then experts or one dense MLP, each on normed input beside a residual.

    The names of its parts are canonical. `attend` is where the flow is: a family whose layer flows
    otherwise overrides that and leaves the rest.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        attention: nn.Module,
        mlp: MixtureOfExperts | DenseMlp,
        eps: float,
        parts: Parts,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(hidden_size, eps=eps, parts=parts, dtype=dtype)

        self.parts = parts
        self.communicates = isinstance(mlp, MixtureOfExperts)
        self.input_layernorm, self.self_attn = norm(), attention
        self.post_attention_layernorm, self.mlp = norm(), mlp

    def forward(self, carry: Carry, context: Context) -> Carry:
        """The five stages in plain order."""
        routed = self.attend(carry, context)
        received = self.dispatch(routed).wait()
        summed_TD = self.combine(self.experts(received), received.route).wait()
        return self.aggregate(summed_TD, routed.residual)

    def attend(self, carry: Carry, context: Context) -> Routed:
        """Attention, the norm after it, and where each token goes."""
        hidden_BSD = carry.hidden_BSD
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), context)
        tokens_TD = self.post_attention_layernorm(hidden_BSD).flatten(0, 1)
        return self.route(tokens_TD, Carry(hidden_BSD, carry.extras), context)

    def route(self, tokens_TD: Tensor, residual: Carry, context: Context) -> Routed:
        """Where each token goes; a family may add to the carry here."""
        if isinstance(self.mlp, DenseMlp):
            return Routed(tokens_TD, residual)
        return Routed(tokens_TD, residual, *self.mlp.gate(tokens_TD, context))

    def dispatch(self, routed: Routed) -> Pending[Received]:
        """Tokens to the ranks of their experts."""
        if not self.communicates:
            return Ready(Received(routed.tokens_TD))
        return dispatch(routed, self.parts)

    def dispatch_backward(
        self, tokens_RD: Tensor, weights_RK: Tensor | None, route: Route | None
    ) -> Pending[tuple[Tensor, Tensor | None]]:
        """Gradients of what was received -> gradients of what was sent."""
        if route is None:
            return Ready((tokens_RD, weights_RK))
        return dispatch_backward(tokens_RD, weights_RK, route, self.parts)

    def experts(self, received: Received) -> Tensor:
        """[R, D] -> one weighted sum of the local experts per row [R, D]."""
        if isinstance(self.mlp, DenseMlp):
            return cast(Tensor, self.mlp(received))
        return self.mlp.experts.sum_weighted(received)

    def combine(self, partial_RD: Tensor, route: Route | None) -> Pending[Tensor]:
        """Partial sums back to the ranks of their tokens."""
        return Ready(partial_RD) if route is None else combine(partial_RD, route, self.parts)

    def combine_backward(self, summed_TD: Tensor, route: Route | None) -> Pending[Tensor]:
        """Gradient of the sums -> gradient of the partial sums."""
        return Ready(summed_TD) if route is None else combine_backward(summed_TD, route, self.parts)

    def aggregate(self, summed_TD: Tensor, residual: Carry) -> Carry:
        """Add what the MLP made to the residual stream."""
        hidden_BSD = residual.hidden_BSD
        return Carry(hidden_BSD + summed_TD.view_as(hidden_BSD), residual.extras)
