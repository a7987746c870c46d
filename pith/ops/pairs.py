"""(row, slot) pairs in the order in which experts read them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """The P pairs of the local experts, sorted by expert, then by row and slot."""

    row_P: Tensor  # [P] int64, the row that each pair reads
    pair_P: Tensor  # [P] int64, the same pairs as flat indices into [R, K]
    position_RK: Tensor  # [R, K] int64, where each pair stands in the order; P: a foreign expert
    counts_e: Tensor  # [e] int64, pairs per local expert
