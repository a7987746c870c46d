"""y = x W^T by the vendor's matrix product in the type of x."""

from torch import Tensor
from torch.nn import functional

from pith.ops.deferred import Product, multiply
from pith.ops.linear.reference import add_weight_grad
from pith.ops.sink import GradSink


def linear(x: Tensor, weight_FD: Tensor, *, sink: GradSink | None = None) -> Tensor:
    """[..., D] -> [..., F] in the type of x. The weight gradient goes to `sink` if there is one."""
    return forward(x, weight_FD) if sink is None else multiply(x, weight_FD, _PRODUCT, sink=sink)


def forward(x: Tensor, weight_FD: Tensor) -> Tensor:
    return functional.linear(x, weight_FD.to(x.dtype))


def input_grad(dy: Tensor, weight_FD: Tensor) -> Tensor:
    return dy @ weight_FD.to(dy.dtype)


_PRODUCT = Product(forward, input_grad, add_weight_grad)
