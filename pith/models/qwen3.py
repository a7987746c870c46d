"""Qwen3, dense and MoE, top to bottom: tokens, layers, logits, loss.

A stage holds a run of neighbouring layers; the whole model is one stage. Parameter names are the
canonical ones of `pith.arch.qwen3`.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from pith.arch.qwen3 import Qwen3
from pith.comm.exchange import Pending, Ready, Route
from pith.layer.attention import GroupedQueryAttention
from pith.layer.combine import combine, combine_backward
from pith.layer.dispatch import dispatch, dispatch_backward
from pith.layer.experts import DenseMlp, Experts
from pith.layer.protocol import Carry, Context, Parts, Received, Routed
from pith.layer.router import Router
from pith.layer.weights import Embedding, Linear, RMSNorm
from pith.ops.precision import wide


class Qwen3Stage(nn.Module):
    """Layers `layers` of the model, with the embedding on the first and the head on the last.

    Parameters are created empty, on the meta device unless told otherwise.
    """

    def __init__(
        self,
        arch: Qwen3,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        parts: Parts,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.arch, self.dtype, self.operators = arch, dtype, parts.operators
        self.is_first, self.is_last = is_first, is_last
        table = (arch.vocab_size, arch.hidden_size)
        with torch.device(device):
            if is_first:
                self.embed_tokens = Embedding(table, parts=parts, dtype=dtype)
            self.layers = nn.ModuleDict(
                {str(n): Qwen3Layer(arch, n, parts=parts, dtype=dtype) for n in layers}
            )
            if is_last:
                self.norm = _norm(arch, parts=parts, dtype=dtype)
                self.lm_head = Linear(table, parts=parts, dtype=dtype)

    def forward(self, tokens_BS: Tensor, context: Context) -> Tensor:
        """The whole model in plain order: token ids [B, S] -> logits [B, S, V]."""
        carry = self.embed(tokens_BS)
        for layer in self.layers.values():
            carry = layer(carry, context)
        return self.logits(carry)

    def embed(self, tokens_BS: Tensor) -> Carry:
        """Token ids [B, S] -> hidden states [B, S, D]. First stage only."""
        return Carry(self.embed_tokens(tokens_BS))

    def logits(self, carry: Carry) -> Tensor:
        """[B, S, V]. Last stage only."""
        return cast(Tensor, self.lm_head(self.norm(carry.hidden_BSD)))

    def loss(self, carry: Carry, labels_BS: Tensor) -> Tensor:
        """Scalar sum of the token losses, float32 or wider; -100 is not counted. Last stage."""
        logits_TV = self.logits(carry).flatten(0, 1)
        return self.operators.cross_entropy(logits_TV, labels_BS.flatten())

    def rotary(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Positions -> cosines and sines [B or 1, S, d] in float32 or wider.

        Channels i and i + d/2 turn by position / theta^(2i/d). Angles are computed in float64:
        float32 would lose 1e-3 of a radian at the end of a long context.
        """
        channels = torch.arange(0, self.arch.head_dim, 2, device=positions_BS.device)
        frequencies = self.arch.rope_theta ** (-channels.double() / self.arch.head_dim)
        angles_BSd = (positions_BS.unsqueeze(-1) * frequencies).repeat(1, 1, 2)
        return angles_BSd.cos().to(wide(self.dtype)), angles_BSd.sin().to(wide(self.dtype))

    def expert_modules(self) -> Iterator[nn.Module]:
        """The modules that hold nothing but stacked experts."""
        for layer in self.layers.values():
            if isinstance(layer.mlp, MixtureOfExperts):
                yield layer.mlp.experts

    def tie_to(self, embedding: nn.Parameter) -> None:
        """Let the head share the storage of `embedding`, staying a parameter of its own."""
        self.lm_head.weight = nn.Parameter(embedding.detach())


class Qwen3Layer(nn.Module):
    """Attention, then experts or one dense MLP, each on normed input beside a residual."""

    def __init__(self, arch: Qwen3, number: int, *, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.communicates = arch.is_moe(number)
        self.input_layernorm = _norm(arch, parts=parts, dtype=dtype)
        self.self_attn = GroupedQueryAttention(
            arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            eps=arch.rms_norm_eps,
            parts=parts,
            dtype=dtype,
        )
        self.post_attention_layernorm = _norm(arch, parts=parts, dtype=dtype)
        self.mlp: MixtureOfExperts | DenseMlp
        if arch.is_moe(number):
            self.mlp = MixtureOfExperts(arch, number, parts=parts, dtype=dtype)
        else:
            size = arch.intermediate_size
            self.mlp = DenseMlp(arch.hidden_size, intermediate_size=size, parts=parts, dtype=dtype)

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
        residual = Carry(hidden_BSD, carry.extras)
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


class MixtureOfExperts(nn.Module):
    """The router and this rank's experts."""

    def __init__(self, arch: Qwen3, number: int, *, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(
            (arch.num_experts, arch.hidden_size),
            layer=number,
            top_k=arch.top_k,
            normalize=arch.norm_topk_prob,
            parts=parts,
            dtype=dtype,
        )
        self.experts = Experts(
            arch.hidden_size,
            intermediate_size=arch.moe_intermediate_size,
            num_experts=arch.num_experts,
            parts=parts,
            dtype=dtype,
        )


def _norm(arch: Qwen3, *, parts: Parts, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps, parts=parts, dtype=dtype)
