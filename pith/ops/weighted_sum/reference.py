"""Bring expert rows back: each row of the input gets the weighted sum over its slots."""

from typing import Any, cast

import torch
from torch import Tensor

from pith.ops.pairs import Pairs
from pith.ops.precision import wide, widen


def weighted_sum(rows_PD: Tensor, weights_RK: Tensor, pairs: Pairs) -> Tensor:
    """out[r] = sum over k of weights[r, k] * rows[position[r, k]]; returns [R, D].

    Summed over k in order, in float32 or wider, then cast to the type of the rows. Slots of
    foreign experts add nothing. Forward and backward only gather, so both are deterministic.
    """
    out_RD = _WeightedSum.apply(rows_PD, weights_RK, pairs)  # type: ignore[no-untyped-call]
    return cast(Tensor, out_RD)


def sum_slots(rows_PD: Tensor, weights_RK: Tensor | None, position_RK: Tensor) -> Tensor:
    """The sum over slots, without gradient. `weights_RK` None: all ones."""
    num_rows, k = position_RK.shape
    if rows_PD.shape[0] < num_rows * k:  # foreign slots read a row of zeros
        rows_PD = torch.cat([rows_PD, rows_PD.new_zeros(1, rows_PD.shape[1])])
    total_RD = rows_PD.new_zeros(num_rows, rows_PD.shape[1], dtype=wide(rows_PD.dtype))
    for slot in range(k):
        term_RD = widen(rows_PD.index_select(0, position_RK[:, slot]))
        if weights_RK is None:
            total_RD += term_RD
        else:
            total_RD.addcmul_(term_RD, weights_RK[:, slot, None].to(total_RD.dtype))
    return total_RD.to(rows_PD.dtype)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, weights_RK: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(rows_PD, weights_RK)
        ctx.pairs = pairs
        return sum_slots(rows_PD, weights_RK, pairs.position_RK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_PD, weights_RK = ctx.saved_tensors
        pairs = ctx.pairs
        dout_PD = widen(grads[0].index_select(0, pairs.row_P))
        dweights_RK = torch.zeros_like(weights_RK)
        dots_P = (dout_PD * widen(rows_PD)).sum(dim=-1)
        dweights_RK.view(-1)[pairs.pair_P] = dots_P.to(weights_RK.dtype)
        weights_P = weights_RK.flatten()[pairs.pair_P].to(dout_PD.dtype)
        return (dout_PD * weights_P.unsqueeze(1)).to(rows_PD.dtype), dweights_RK, None
