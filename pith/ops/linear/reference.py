"""y = x W^T, multiplied in float32 or wider."""

from torch import Tensor

from pith.ops.deferred import Product, add_product, multiply
from pith.ops.precision import widen
from pith.ops.sink import GradSink


def linear(x: Tensor, weight_FD: Tensor, *, sink: GradSink | None = None) -> Tensor:
    """[..., D] -> [..., F] in the type of x. The weight gradient goes to `sink` if there is one."""
    return forward(x, weight_FD) if sink is None else multiply(x, weight_FD, _PRODUCT, sink=sink)


def forward(x: Tensor, weight_FD: Tensor) -> Tensor:
    return (widen(x) @ widen(weight_FD).t()).to(x.dtype)


def input_grad(dy: Tensor, weight_FD: Tensor) -> Tensor:
    return (widen(dy) @ widen(weight_FD)).to(dy.dtype)


def add_weight_grad(main_FD: Tensor, x: Tensor, dy: Tensor) -> None:
    add_product(main_FD, dy.flatten(0, -2), x.flatten(0, -2))


_PRODUCT = Product(forward, input_grad, add_weight_grad)
