"""Causal grouped-query attention with the whole score matrix in view."""

import torch
from torch import Tensor

from pith.ops.precision import widen


def attention(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, *, scale: float) -> Tensor:
    """softmax(q k^T * scale) v with position i seeing 0..i; returns [B, S, H, d].

    H is a multiple of G: each key-value head serves H / G neighbouring query heads.
    """
    repeats = q_BSHd.shape[2] // k_BSGd.shape[2]
    q = widen(q_BSHd).transpose(1, 2)  # [B, H, S, d]
    k = widen(k_BSGd).transpose(1, 2).repeat_interleave(repeats, dim=1)
    v = widen(v_BSGd).transpose(1, 2).repeat_interleave(repeats, dim=1)
    scores_BHSS = q @ k.transpose(-1, -2) * scale
    future_SS = scores_BHSS.new_ones(scores_BHSS.shape[-2:], dtype=torch.bool).triu(1)
    probs_BHSS = scores_BHSS.masked_fill(future_SS, float("-inf")).softmax(dim=-1)
    return (probs_BHSS @ v).transpose(1, 2).to(q_BSHd.dtype)
