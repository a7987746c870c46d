"""RMSNorm, by its formula."""

import torch
from torch import Tensor

from pith.ops.precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis [..., D]; arXiv 1910.07467."""
    x_wide = widen(x)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * scale * widen(weight)).to(x.dtype)
