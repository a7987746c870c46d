"""Hand each (row, slot) pair its row."""

from typing import Any, cast

import torch
from torch import Tensor

from pith.ops.pairs import Pairs
from pith.ops.weighted_sum.reference import sum_slots


def gather_rows(x_RD: Tensor, pairs: Pairs) -> Tensor:
    """x[row] for each pair: [R, D] -> [P, D], sorted by expert.

    The gradient sums over a row's slots in order, in float32 or wider: deterministic.
    """
    return cast(Tensor, _GatherRows.apply(x_RD, pairs))  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x_RD.index_select(0, pairs.row_P)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return sum_slots(grads[0], None, ctx.pairs.position_RK), None
