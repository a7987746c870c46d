"""SwiGLU."""

from torch import Tensor
from torch.nn.functional import silu

from pith.ops.precision import widen


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element, in float32 or wider; arXiv 2002.05202."""
    return (silu(widen(gate)) * widen(up)).to(gate.dtype)
