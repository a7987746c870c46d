"""Parameters whose gradient is cheap: it goes to the sink during backward."""

from typing import Any, cast

import torch
from torch import Tensor

from pith.ops.sink import GradSink


def tap(parameter: Tensor, sink: GradSink | None) -> Tensor:
    """`parameter` itself, its gradient given to `sink.add` instead of autograd.

    For norms and biases. Without a sink, plain autograd.
    """
    if sink is None:
        return parameter
    return cast(Tensor, _Tap.apply(parameter, sink))  # type: ignore[no-untyped-call]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sink: GradSink) -> Tensor:
        ctx.parameter, ctx.sink = parameter, sink
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.sink.add(ctx.parameter, grads[0])
        return None, None
