"""Which rows each expert reads."""

import torch
from torch import Tensor

from pith.ops.pairs import Pairs


def sort_pairs(ids_RK: Tensor, counts_e: Tensor, *, first_expert: int, num_experts: int) -> Pairs:
    """Sort the (row, slot) pairs of [R, K] by expert, keeping those of the local experts.

    Local experts are `first_expert` and following, `counts_e[i]` pairs each. Where they are all
    `num_experts`, nothing is foreign and no count is waited for.
    """
    num_rows, k = ids_RK.shape
    num_local = counts_e.shape[0]
    local = ids_RK.flatten() - first_expert
    foreign = (local < 0) | (local >= num_local)
    pair_P = local.masked_fill(foreign, num_local).argsort(stable=True)
    if num_local < num_experts:
        pair_P = pair_P[: int(counts_e.sum())]
    position = torch.full_like(local, pair_P.shape[0])
    position[pair_P] = torch.arange(pair_P.shape[0], device=pair_P.device)
    return Pairs(pair_P // k, pair_P, position.view(num_rows, k), counts_e)
