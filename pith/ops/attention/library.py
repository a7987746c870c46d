"""Attention by torch's own kernels: flash on CPU; cuDNN, flash or another on CUDA."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, *, scale: float) -> Tensor:
    """Causal softmax(q k^T * scale) v, grouped heads; returns [B, S, H, d]."""
    out_BHSd = scaled_dot_product_attention(
        q_BSHd.transpose(1, 2),
        k_BSGd.transpose(1, 2),
        v_BSGd.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q_BSHd.shape[2] != k_BSGd.shape[2],
    )
    return out_BHSd.transpose(1, 2)
