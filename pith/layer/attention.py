"""Grouped-query attention with an RMSNorm on each query and key head."""

import torch
from torch import Tensor, nn

from pith.layer.protocol import Context, Parts
from pith.layer.weights import Linear, RMSNorm


class GroupedQueryAttention(nn.Module):
    """H query heads share G key-value heads of width d; rope; causal; no bias."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        parts: Parts,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        query, kv = num_heads * head_dim, num_kv_heads * head_dim

        def linear(num_out: int, num_in: int) -> Linear:
            return Linear((num_out, num_in), parts=parts, dtype=dtype)

        def norm() -> RMSNorm:
            return RMSNorm(head_dim, eps=eps, parts=parts, dtype=dtype)

        self.operators, self.head_dim = parts.operators, head_dim
        self.q_proj, self.q_norm = linear(query, hidden_size), norm()
        self.k_proj, self.k_norm = linear(kv, hidden_size), norm()
        self.v_proj = linear(kv, hidden_size)
        self.o_proj = linear(hidden_size, query)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """Normed hidden states [B, S, D] -> what attention adds to them [B, S, D]."""
        heads = (-1, self.head_dim)
        q_BSHd = self.q_norm(self.q_proj(x_BSD).unflatten(-1, heads))
        k_BSGd = self.k_norm(self.k_proj(x_BSD).unflatten(-1, heads))
        v_BSGd = self.v_proj(x_BSD).unflatten(-1, heads)
        q_BSHd = self.operators.rope(q_BSHd, context.cos_BSd, context.sin_BSd)
        k_BSGd = self.operators.rope(k_BSGd, context.cos_BSd, context.sin_BSd)
        out_BSHd = self.operators.attention(q_BSHd, k_BSGd, v_BSGd, scale=self.head_dim**-0.5)
        out_BSD: Tensor = self.o_proj(out_BSHd.flatten(2))  # [B, S, H * d] -> [B, S, D]
        return out_BSD
