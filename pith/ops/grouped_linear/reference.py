"""One matrix product per expert, in a loop, in float32 or wider."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.ops.deferred import Product, add_product, multiply
from pith.ops.precision import widen
from pith.ops.sink import GradSink


def grouped_linear(
    x_PD: Tensor, weight_eFD: Tensor, counts_e: Tensor, *, sink: GradSink | None = None
) -> Tensor:
    """Rows sorted by expert [P, D] -> [P, F]; rows past the last expert give zeros.

    Expert i reads the next `counts_e[i]` rows. The weight gradient goes to `sink` if there is one.
    """
    counts = counts_e.tolist()
    if sink is None:
        return _forward(x_PD, weight_eFD, counts)
    product = Product(
        forward=lambda x, weight: _forward(x, weight, counts),
        input_grad=lambda dy, weight: _forward(dy, weight.transpose(1, 2), counts),
        add_weight_grad=lambda main, x, dy: _add_weight_grad(main, x, dy, counts),
    )
    return multiply(x_PD, weight_eFD, product, sink=sink)


def _forward(x_PD: Tensor, weight_eFD: Tensor, counts: list[int]) -> Tensor:
    num_past = x_PD.shape[0] - sum(counts)
    outputs = [
        (widen(x) @ widen(weight).t()).to(x.dtype)
        for x, weight in zip(_split(x_PD, counts), weight_eFD.unbind(), strict=True)
    ]
    return torch.cat([*outputs, x_PD.new_zeros(num_past, weight_eFD.shape[1])])


def _add_weight_grad(main_eFD: Tensor, x_PD: Tensor, dy_PF: Tensor, counts: list[int]) -> None:
    experts = zip(main_eFD.unbind(), _split(x_PD, counts), _split(dy_PF, counts), strict=True)
    for main_FD, x, dy in experts:
        if x.shape[0]:
            add_product(main_FD, dy, x)


def _split(rows: Tensor, counts: list[int]) -> Iterator[Tensor]:
    num_past = rows.shape[0] - sum(counts)
    return iter(torch.split(rows, [*counts, num_past])[:-1])
