"""Rotary position embedding, half rotation."""

import torch
from torch import Tensor

from pith.ops.precision import widen


def rope(x_BSHd: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> Tensor:
    """Rotate channel i with channel i + d/2 by the angle of its position; arXiv 2104.09864.

    `cos_BSd` and `sin_BSd` are [B or 1, S, d] in float32 or wider, their halves equal.
    """
    x = widen(x_BSHd)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = x * cos_BSd.unsqueeze(2) + turned * sin_BSd.unsqueeze(2)
    return rotated.to(x_BSHd.dtype)
