"""The auxiliary losses of a router: how evenly it spreads its tokens, how large its logits are.

Shape letters besides those of the protocol: G groups of n tokens, each balanced on its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from pith.layer.protocol import Context, RouterLosses
from pith.ops.precision import widen


@dataclass(slots=True)
class StepLoad:
    """The global load of one step; made anew for each. `sum_over_ranks` is a collective."""

    sum_over_ranks: Callable[[Tensor], Tensor]
    _totals: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, counts_E: Tensor) -> Tensor:
        """Add one micro-batch of every rank [E] int64; the counts of the step so far [E]."""
        self._totals[layer] = self._totals.get(layer, 0) + self.sum_over_ranks(counts_E)
        return self._totals[layer]


def count_pairs(ids: Tensor, *, first_expert: int, num_experts: int) -> Tensor:
    """Expert ids [..., n] -> [..., num_experts] int64: pairs per expert from `first_expert` on.

    Ids outside are not counted.
    """
    local = ids - first_expert
    foreign = (local < 0) | (local >= num_experts)
    counts = ids.new_zeros(*ids.shape[:-1], num_experts + 1)
    counts.scatter_add_(-1, local.masked_fill(foreign, num_experts), torch.ones_like(ids))
    return counts[..., :num_experts]


def balance_loss(probs_GnE: Tensor, counts_GE: Tensor) -> Tensor:
    """E * sum_e f_e * P_e of each group, averaged over groups: 1.0 is perfect balance.

    f_e is the fraction of (token, slot) pairs on expert e, P_e its mean router probability. Only P
    carries a gradient.
    """
    num_experts = counts_GE.shape[1]
    fractions_GE = counts_GE.to(probs_GnE.dtype) / counts_GE.sum(dim=1, keepdim=True)
    return num_experts * (fractions_GE * probs_GnE.mean(dim=1)).sum(dim=1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, float32 or wider (arXiv 2202.08906)."""
    return widen(logits_TE).logsumexp(dim=-1).square().mean()


def attach_losses(
    weights_TK: Tensor,
    logits_TE: Tensor,
    probs_TE: Tensor,
    ids_TK: Tensor,
    context: Context,
    *,
    layer: int,
) -> Tensor:
    """Record what one router did and let its auxiliary losses ride on its weights.

    Tokens are those of B sequences of equal length, one after another.
    """
    losses, num_experts = context.losses, probs_TE.shape[1]
    length = context.cos_BSd.shape[1] if losses.scope == "sequence" else len(probs_TE)
    probs_GnE = probs_TE.view(-1, length, num_experts)
    ids_GP = ids_TK.reshape(len(probs_GnE), -1)
    counts_GE = count_pairs(ids_GP, first_expert=0, num_experts=num_experts)
    balance = balance_loss(probs_GnE, _balanced_counts(counts_GE, losses, layer))
    z = z_loss(logits_TE)
    context.meter.record(layer, counts_GE.sum(dim=0), balance.detach(), z.detach())
    scaled = [(balance, losses.balance_scale), (z, losses.z_scale)]
    terms = [loss * scale for loss, scale in scaled if scale != 0]
    if not terms:
        return weights_TK
    loss = torch.stack(terms).sum()
    return cast(Tensor, _AttachLoss.apply(weights_TK, loss))  # type: ignore[no-untyped-call]


def _balanced_counts(counts_GE: Tensor, losses: RouterLosses, layer: int) -> Tensor:
    """The pairs that f is taken of.

    Per sequence arXiv 2405.04434, per micro-batch 2101.03961, per global batch 2501.11873.
    """
    if losses.scope != "global-batch":
        return counts_GE
    if losses.load is None:
        assert losses.balance_scale == 0, "the balance loss of a global batch needs its load"
        return counts_GE
    return losses.load.add(layer, counts_GE[0])[None]


class _AttachLoss(torch.autograd.Function):
    """The weights unchanged; in backward the scalar loss receives the gradient 1."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_grad = torch.ones_like(loss)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.loss_grad
