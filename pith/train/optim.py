"""The optimizer, its parameter groups, its learning rate and the clipping of gradients."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from pith.arch.parameter import ParameterSpec, Role
from pith.errors import RequestError

NOT_DECAYED = frozenset({Role.NORM, Role.BIAS})
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    named: Mapping[str, Tensor],
    specs: Mapping[str, ParameterSpec],
    *,
    name: Literal["adamw"] = "adamw",
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    lr: float,
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over the parameters `named` by canonical name.

    The role in `specs` decides which group a parameter is in: norms and biases are not decayed.
    The moments have the dtype of the parameters, float32 for master weights, and are there from the
    start. Raises RequestError for an optimizer that does not exist.
    """
    if name != "adamw":
        raise RequestError(
            "optimizer.unknown",
            what="no such optimizer",
            found=name,
            wanted="adamw",
            where="optimizer.name",
        )
    decayed = [tensor for key, tensor in named.items() if specs[key].role not in NOT_DECAYED]
    plain = [tensor for key, tensor in named.items() if specs[key].role in NOT_DECAYED]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, weight_decay), (plain, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    for parameter in named.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What `optimizer` remembers of `parameter` by name, in its shape: the tensors themselves."""
    return {moment: optimizer.state[parameter][moment] for moment in MOMENTS}


def set_num_updates(optimizer: torch.optim.Optimizer, num_updates: int) -> None:
    """Let `optimizer` go on as after so many updates, which its bias correction counts."""
    for state in optimizer.state.values():
        state["step"].fill_(num_updates)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group of `optimizer` the rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_coefficient(norm: float, clip: float) -> float:
    """What to multiply every gradient by so that a global norm of `norm` is at most `clip`.

    `clip` 0 means no clipping. `norm` is finite: a step with a non-finite one is never taken.
    """
    assert math.isfinite(norm), norm
    return clip / norm if 0.0 < clip < norm else 1.0
