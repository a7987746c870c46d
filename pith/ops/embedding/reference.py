"""Rows of a table."""

from torch import Tensor
from torch.nn import functional

from pith.ops.deferred import Product, multiply
from pith.ops.sink import GradSink


def embedding(ids: Tensor, weight_VD: Tensor, *, sink: GradSink | None = None) -> Tensor:
    """ids [...] int64 -> rows [..., D]. The weight gradient goes to `sink` if there is one.

    It sums in float32 or wider, with and without a sink.
    """
    return multiply(ids, weight_VD, _PRODUCT, sink=sink)


def input_grad(dy: Tensor, weight_VD: Tensor) -> Tensor:
    raise AssertionError("token ids have no gradient")


def add_weight_grad(main_VD: Tensor, ids: Tensor, dy: Tensor) -> None:
    ids_T, dy_TD = ids.flatten(), dy.flatten(0, -2).to(main_VD.dtype)
    if main_VD.is_cuda:  # sorts the ids; index_add_ there adds in no fixed order
        main_VD.index_put_((ids_T,), dy_TD, accumulate=True)
    else:
        main_VD.index_add_(0, ids_T, dy_TD)


_PRODUCT = Product(functional.embedding, input_grad, add_weight_grad)
