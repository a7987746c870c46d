"""Grouped-query attention, plain and with a norm on each head."""

import torch
from torch import Tensor, nn

from pith.arch.decoder import Decoder
from pith.layer.protocol import Context, Parts
from pith.layer.weights import Linear, RMSNorm


class GroupedQueryAttention(nn.Module):
    """H query heads share G key-value heads of width d; rope; causal; no bias."""

    def __init__(self, arch: Decoder, *, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = arch.hidden_size, arch.head_dim
        query, kv = arch.num_heads * width, arch.num_kv_heads * width

        def linear(num_out: int, num_in: int) -> Linear:
            return Linear((num_out, num_in), parts=parts, dtype=dtype)

        self.operators, self.head_dim = parts.operators, width
        self.q_proj, self.k_proj, self.v_proj = (linear(size, hidden) for size in (query, kv, kv))
        self.o_proj = linear(hidden, query)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """Normed hidden states [B, S, D] -> what attention adds to them [B, S, D]."""
        angles = context.cos_BSd, context.sin_BSd
        q_BSHd = self.operators.rope(self.query(x_BSD), *angles)
        k_BSGd = self.operators.rope(self.key(x_BSD), *angles)
        v_BSGd = self.heads(self.v_proj(x_BSD))
        out_BSHd = self.operators.attention(q_BSHd, k_BSGd, v_BSGd, scale=self.head_dim**-0.5)
        out_BSD: Tensor = self.o_proj(out_BSHd.flatten(2))  # [B, S, H * d] -> [B, S, D]
        return out_BSD

    def query(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> queries before rope [B, S, H, d]."""
        return self.heads(self.q_proj(x_BSD))

    def key(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> keys before rope [B, S, G, d]."""
        return self.heads(self.k_proj(x_BSD))

    def heads(self, x_BSF: Tensor) -> Tensor:
        """[B, S, heads * d] -> [B, S, heads, d]."""
        return x_BSF.view(*x_BSF.shape[:-1], -1, self.head_dim)


class NormedHeadsAttention(GroupedQueryAttention):
    """The same with an RMSNorm on each query and key head."""

    def __init__(self, arch: Decoder, *, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__(arch, parts=parts, dtype=dtype)

        def norm() -> RMSNorm:
            return RMSNorm(arch.head_dim, eps=arch.rms_norm_eps, parts=parts, dtype=dtype)

        self.q_norm, self.k_norm = norm(), norm()

    def query(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> normed queries before rope [B, S, H, d]."""
        q_BSHd: Tensor = self.q_norm(super().query(x_BSD))
        return q_BSHd

    def key(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> normed keys before rope [B, S, G, d]."""
        k_BSGd: Tensor = self.k_norm(super().key(x_BSD))
        return k_BSGd
