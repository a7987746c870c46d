"""Modules that hold one weight each, and hand its gradient to the sink."""

import torch
from torch import Tensor, nn

from pith.layer.protocol import Parts
from pith.ops.tap import tap


class Weighted(nn.Module):
    """One parameter named `weight`, created empty."""

    def __init__(self, shape: tuple[int, ...], *, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


class Linear(Weighted):
    """[..., D] -> [..., F], weight [F, D], no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.operators.linear(x, self.weight, sink=self.parts.sink)


class GroupedLinear(Weighted):
    """Rows sorted by expert [P, D] -> [P, F], weight [e, F, D], no bias."""

    def forward(self, x_PD: Tensor, counts_e: Tensor) -> Tensor:
        operators = self.parts.operators
        return operators.grouped_linear(x_PD, self.weight, counts_e, sink=self.parts.sink)


class Embedding(Weighted):
    """Token ids [...] -> [..., D], weight [V, D]."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.parts.operators.embedding(ids, self.weight, sink=self.parts.sink)


class RMSNorm(Weighted):
    """RMSNorm over the last axis, weight [D]."""

    def __init__(self, size: int, *, eps: float, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__((size,), parts=parts, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.operators.rms_norm(x, tap(self.weight, self.parts.sink), self.eps)
