"""What a family says about each of its parameters."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a parameter is for: decides initial values, weight decay and optimizer group."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"  # a hidden projection, [out, in]
    EXPERTS = "experts"  # stacked expert projections, [E, out, in]
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One canonical tensor of a model.

    `name` is canonical: "layers.3.mlp.experts.gate_proj.weight", experts stacked on the first axis.
    `std` is the standard deviation of its normal initial values; 0 means the constant `fill`.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None  # None: embedding, final norm, head
    std: float = 0.0
    fill: float = 0.0

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count
