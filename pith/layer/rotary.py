"""The angles by which rope turns queries and keys."""

import torch
from torch import Tensor

from pith.ops.precision import wide


def rotary(
    positions_BS: Tensor, *, width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Positions -> cosines and sines [B or 1, S, width] in float32, or in `dtype` if wider.

    Channels i and i + width/2 turn by position / base^(2i/width) (arXiv 2104.09864). Angles are
    computed in float64: float32 would lose 1e-3 of a radian at the end of a long context.
    """
    channels = torch.arange(0, width, 2, device=positions_BS.device)
    frequencies = base ** (-channels.double() / width)
    angles_BSd = (positions_BS.unsqueeze(-1) * frequencies).repeat(1, 1, 2)
    return angles_BSd.cos().to(wide(dtype)), angles_BSd.sin().to(wide(dtype))
