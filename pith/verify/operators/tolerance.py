"""How far an operator may be from its definition in float64: the one table."""

from collections.abc import Mapping
from math import inf, isfinite
from types import MappingProxyType

import torch
from torch import Tensor

from pith.ops import REFERENCE
from pith.ops.precision import wide

# ||found - exact|| / ||exact||, beyond what rounding the exact result once costs.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.bfloat16: 6e-3,  # intermediate results rounded once or twice
    }
)


def tolerance(implementation: str, dtype: torch.dtype) -> float:
    """What an implementation may be off that is given `dtype`.

    A reference computes in float32 or wider and rounds once.
    """
    return TOLERANCE.get(wide(dtype) if implementation == REFERENCE else dtype, 0.0)


def error(found: Tensor, exact: Tensor, *, scale: float = 0.0) -> float:
    """The relative error of `found`, in its own type, beyond rounding `exact` to that type.

    Infinity where shapes differ, where anything is not finite, where whole numbers differ, and
    where an exact zero is not zero. What is smaller than `scale` is measured against that.
    """
    if found.shape != exact.shape:
        return inf
    if not exact.is_floating_point():
        return 0.0 if torch.equal(found.cpu(), exact) else inf
    own = found.detach().cpu().double()
    rounding = (exact.to(found.dtype).double() - exact).abs()
    beyond = ((own - exact).abs() - rounding).clamp(min=0).norm().item()
    size = max(exact.norm().item(), scale)
    relative = beyond / size if size else (inf if beyond else 0.0)
    return relative if isfinite(relative) else inf
