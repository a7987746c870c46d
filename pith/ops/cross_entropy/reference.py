"""The criterion: a sum, so that the one division happens after the whole batch."""

from torch import Tensor
from torch.nn import functional

from pith.ops.cross_entropy import NOT_COUNTED
from pith.ops.precision import widen


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Scalar sum of the token losses in float32 or wider; labels of -100 are not counted.

    With no counted label it is exactly 0, and so are its gradients.
    """
    return functional.cross_entropy(
        widen(logits_TV), labels_T, ignore_index=NOT_COUNTED, reduction="sum"
    )
