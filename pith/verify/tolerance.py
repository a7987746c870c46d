"""How far apart two runs of one recipe may be: the one table.

A figure is relative to the larger of two values. Where both ran on a CPU in the same order of sums
there is no figure: the bits are equal.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may differ. 0 asks for equal bits; None leaves a quantity out of the comparison."""

    name: str  # in words, for reports
    loss: float  # of each step; with `mean_loss` of the mean over the last MEAN_STEPS steps
    grad_norm: float | None
    balance: float | None  # balance loss and z loss
    load: float | None  # the share of a layer's (token, slot) pairs that went to another expert
    weights: float | None  # ||a - b|| of each final tensor, relative to the larger norm
    mean_loss: bool = False


MEAN_STEPS = 20
PRECISIONS = ("float64", "float32", "bfloat16", "float8")  # from the highest to the lowest

EQUAL_BITS = Tolerance("same order on a CPU: equal bits", 0, 0, 0, 0, 0)
# At least 40 times what 20 steps on other layouts were measured to differ by; no tie is near.
FLOAT64 = Tolerance("float64, other order", 1e-12, 1e-11, 1e-12, 0, 1e-12)
# Rounding alone stays a hundredfold below. The room is for a few pairs whose top-k is a near tie:
# one of them moves a gradient norm by 1e-4.
FLOAT32 = Tolerance("float32, other order", 1e-5, 2e-4, 1e-4, 0.01, 2e-3)
# Near ties are common: which expert a token goes to, and so each weight, is no stable figure.
BFLOAT16 = Tolerance("bfloat16", 5e-3, 0.05, 0.05, None, None)
FLOAT8 = Tolerance("float8", 0.01, None, None, None, None, mean_loss=True)
TABLE = (EQUAL_BITS, FLOAT64, FLOAT32, BFLOAT16, FLOAT8)


def tolerance_for(first: str, second: str, *, same_order: bool) -> Tolerance:
    """The row of two runs of these precisions: that of the lower one.

    `same_order` says that both added every sum on a CPU in one order.
    """
    lower = max(first, second, key=PRECISIONS.index)
    if same_order and first == second and lower in ("float64", "float32"):
        return EQUAL_BITS
    match lower:
        case "float64":
            return FLOAT64
        case "float32":
            return FLOAT32
        case "bfloat16":
            return BFLOAT16
        case _:
            return FLOAT8
