"""Where float32 is the least: reductions, router scores, main gradients."""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the data is float64 already."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """`x` in float32 or wider; itself where it is so already."""
    return x.to(wide(x.dtype))
