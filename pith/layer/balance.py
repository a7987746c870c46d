"""Load balance: how evenly a router spreads its tokens, and the gradient that evens them out."""

from typing import Any, cast

import torch
from torch import Tensor

from pith.layer.protocol import Context


def count_pairs(ids: Tensor, *, first_expert: int, num_experts: int) -> Tensor:
    """Expert ids [..., n] -> [..., num_experts] int64: pairs per expert from `first_expert` on.

    Ids outside are not counted.
    """
    local = ids - first_expert
    foreign = (local < 0) | (local >= num_experts)
    counts = ids.new_zeros(*ids.shape[:-1], num_experts + 1)
    counts.scatter_add_(-1, local.masked_fill(foreign, num_experts), torch.ones_like(ids))
    return counts[..., :num_experts]


def sequence_balance(probs_BSE: Tensor, counts_BE: Tensor) -> Tensor:
    """Balance loss of each sequence, averaged over sequences: 1.0 is perfect balance.

    E * sum_e f_e * P_e, with f_e the fraction of a sequence's (token, slot) pairs on expert e and
    P_e its mean router probability (arXiv 2405.04434). Only P carries a gradient.
    """
    num_experts = counts_BE.shape[1]
    fractions_BE = counts_BE.to(probs_BSE.dtype) / counts_BE.sum(dim=1, keepdim=True)
    return num_experts * (fractions_BE * probs_BSE.mean(dim=1)).sum(dim=1).mean()


def attach_loss(weights_TK: Tensor, loss: Tensor, *, scale: float) -> Tensor:
    """`weights_TK` unchanged; in backward `loss` receives the gradient `scale`."""
    ridden = _AttachLoss.apply(weights_TK, loss, scale)  # type: ignore[no-untyped-call]
    return cast(Tensor, ridden)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.loss_grad = torch.full_like(loss, scale)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.loss_grad, None


def balance(
    weights_TK: Tensor, probs_TE: Tensor, ids_TK: Tensor, context: Context, *, layer: int
) -> Tensor:
    """Record the load of one router and let the sequence balance loss ride on its weights.

    Tokens are those of B sequences of equal length, one after another.
    """
    length = context.cos_BSd.shape[1]
    probs_BSE = probs_TE.view(-1, length, probs_TE.shape[1])
    ids_BP = ids_TK.reshape(probs_BSE.shape[0], -1)
    counts_BE = count_pairs(ids_BP, first_expert=0, num_experts=probs_TE.shape[1])
    loss = sequence_balance(probs_BSE, counts_BE)
    context.meter.record(layer, counts_BE.sum(dim=0), loss.detach())
    if context.balance_scale == 0:
        return weights_TK
    return attach_loss(weights_TK, loss, scale=context.balance_scale)
