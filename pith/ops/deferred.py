"""The one autograd function behind every weight product.

Its backward computes the input gradient and hands the weight gradient to a sink as a closure, so
that the schedule decides when the second half of the work runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pith.ops.precision import wide
from pith.ops.sink import GradSink


@dataclass(frozen=True, slots=True)
class Product:
    """A product of an input with a weight, as three formulas."""

    forward: Callable[[Tensor, Tensor], Tensor]  # (x, weight) -> y
    input_grad: Callable[[Tensor, Tensor], Tensor]  # (dy, weight) -> dx
    add_weight_grad: Callable[[Tensor, Tensor, Tensor], None]  # (main, x, dy), in place on main


def multiply(x: Tensor, weight: Tensor, product: Product, *, sink: GradSink | None) -> Tensor:
    """`product.forward(x, weight)`; the weight gradient goes to `sink`.

    Without a sink it is computed at once and returned to autograd.
    """
    return cast(Tensor, _Multiply.apply(x, weight, product, sink))  # type: ignore[no-untyped-call]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, product: Product, sink: GradSink | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.product, ctx.sink = weight, product, sink
        return product.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        weight, product = ctx.weight, ctx.product
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = product.input_grad(dy, weight) if needs_x else None
        if not needs_weight:
            return dx, None, None, None
        # Detached, or the closure would keep the graph that computed x alive.
        accumulate = partial(_accumulate, product, ctx.saved_tensors[0].detach(), dy.detach())
        if ctx.sink is not None:
            ctx.sink.defer(weight, accumulate)
            return dx, None, None, None
        dweight = torch.zeros_like(weight, dtype=wide(weight.dtype))
        accumulate(dweight)
        return dx, dweight.to(weight.dtype), None, None


def _accumulate(product: Product, x: Tensor, dy: Tensor, main: Tensor) -> None:
    product.add_weight_grad(main, x, dy)


def add_product(main_FD: Tensor, dy_NF: Tensor, x_ND: Tensor) -> None:
    """main += dy^T x in the precision of `main`, which may be wider than the operands."""
    if dy_NF.dtype == main_FD.dtype:
        main_FD.addmm_(dy_NF.t(), x_ND)
    elif main_FD.is_cuda:
        # Adds in the product's epilogue: main is read and written once.
        torch.addmm(main_FD, dy_NF.t(), x_ND, out_dtype=main_FD.dtype, out=main_FD)
    else:
        main_FD.addmm_(dy_NF.t().to(main_FD.dtype), x_ND.to(main_FD.dtype))
