"""Parameters across a step: gathered once, reduced once.

The engine sees four calls: `gather` before the first slot, `main_grad` during the step (through
the gradient sink), `reduce` after the last slot, `release` at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pith.engine.weight_grads import WeightGrads


@dataclass(frozen=True, slots=True)
class Tied:
    """The embedding and the head are one weight.

    `embedding` and `head` are the parameters on this rank; None where another rank holds them,
    and then `group` joins the two ranks. Where this rank holds both they share storage, and the
    main gradients stay apart until the end of the step, so that their sum has the same bits on
    every placement.
    """

    embedding: nn.Parameter | None
    head: nn.Parameter | None
    group: dist.ProcessGroup | None


class Parameters:
    """One rank's parameters: float32 masters, and the compute copies that modules hold.

    Where the compute type is float32 or wider the two are the same storage.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        weights: WeightGrads,
        tied: Tied | None,
    ) -> None:
        self._compute = dict(named)
        self._weights = weights
        self._tied = tied
        self.masters = {name: _master(parameter) for name, parameter in named.items()}

    def gather(self) -> None:
        """Bring the compute copies up to date with the masters, and empty the main gradients."""
        self._weights.zero()
        with torch.no_grad():
            for name, parameter in self._compute.items():
                if parameter.dtype != self.masters[name].dtype:
                    parameter.copy_(self.masters[name])

    def reduce(self, *, scale: float) -> dict[str, Tensor]:
        """The finished gradients by canonical name, times `scale`, set on the masters."""
        self._sum_tied()
        grads = {name: self._weights.main_grad(p) for name, p in self._compute.items()}
        if grads:  # a rank may hold empty stages only
            torch._foreach_mul_(list(grads.values()), scale)
        for name, grad in grads.items():
            self.masters[name].grad = grad
        return grads

    def release(self) -> None:
        """Let go of the gradients."""
        for master in self.masters.values():
            master.grad = None

    def _sum_tied(self) -> None:
        if self._tied is None:
            return
        embedding, head, group = self._tied.embedding, self._tied.head, self._tied.group
        if embedding is not None and head is not None:
            self._weights.main_grad(embedding).add_(self._weights.main_grad(head))
        else:
            mine = embedding if embedding is not None else head
            if mine is not None:
                assert group is not None
                dist.all_reduce(self._weights.main_grad(mine), group=group)


def _master(parameter: nn.Parameter) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach() if dtype == parameter.dtype else parameter.detach().to(dtype)
