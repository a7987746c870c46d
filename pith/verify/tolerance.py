"""How far apart two runs of one recipe may be: the one table.

A figure is relative to the larger of two values. Where both ran on a CPU in the same order of sums
there is no figure: the bits are equal.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may differ. 0 asks for equal bits."""

    name: str  # in words, for reports
    loss: float  # of each step; with `mean_loss` of the mean over the last steps
    grad_norm: float
    balance: float  # balance loss and z loss
    load: float  # the share of a layer's (token, slot) pairs that went to another expert
    weights: float  # ||a - b|| / ||b|| of each final tensor
    mean_loss: bool = False


EQUAL_BITS = Tolerance("same order on a CPU: equal bits", 0, 0, 0, 0, 0)
