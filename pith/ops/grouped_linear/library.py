"""All experts in one torch kernel: no loop and, on CUDA, no wait for the counts."""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from pith.ops.deferred import Product, multiply
from pith.ops.sink import GradSink


def grouped_linear(
    x_PD: Tensor, weight_eFD: Tensor, counts_e: Tensor, *, sink: GradSink | None = None
) -> Tensor:
    """Rows sorted by expert [P, D] -> [P, F]; rows past the last expert give zeros.

    Expert i reads the next `counts_e[i]` rows. D and F are multiples of 16 bytes. The weight
    gradient goes to `sink` if there is one.
    """
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    product = Product(
        forward=lambda x, weight: _rows(x, weight.transpose(1, 2), ends_e),
        input_grad=lambda dy, weight: _rows(dy, weight, ends_e),
        add_weight_grad=lambda main, x, dy: _add_weight_grad(main, x, dy, ends_e),
    )
    return multiply(x_PD, weight_eFD, product, sink=sink)


def _rows(x_PD: Tensor, weight_eDF: Tensor, ends_e: Tensor) -> Tensor:
    """Products of the rows; the kernel never writes those past the last offset."""
    out_PF = grouped_mm(x_PD.contiguous(), weight_eDF, offs=ends_e)
    past_P = torch.arange(x_PD.shape[0], device=x_PD.device) >= ends_e[-1]
    return out_PF.masked_fill_(past_P.unsqueeze(1), 0)


def _add_weight_grad(main_eFD: Tensor, x_PD: Tensor, dy_PF: Tensor, ends_e: Tensor) -> None:
    grad_eFD = grouped_mm(dy_PF.contiguous().t(), x_PD.contiguous(), offs=ends_e)
    main_eFD.add_(grad_eFD)
