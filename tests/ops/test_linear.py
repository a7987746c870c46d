"""What weights leave to a sink: nothing more than is needed, and nothing where they are frozen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pith.engine.weight_grads import WeightGrads
from pith.ops.sink import GradSink
from pith.ops.tap import tap

Find = Callable[..., Callable[..., Any]]


class GraphInspector:
    """A sink that looks at what the deferred closures hold."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def add(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self.held.append(grad)

    def defer(self, parameter: torch.Tensor, accumulate: Any) -> None:
        self.held += [value for value in accumulate.args if isinstance(value, torch.Tensor)]


def test_a_wide_input_makes_a_wide_product_from_a_narrow_weight(
    operator: Find, sink: WeightGrads, generator: torch.Generator
) -> None:
    weight = nn.Parameter(torch.randn(8, 16, generator=generator).bfloat16())
    x = torch.randn(4, 16, generator=generator, requires_grad=True)
    for implementation in ("reference", "library"):
        y = operator("linear", implementation)(x, weight, sink=sink)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, x @ weight.float().t())


def test_deferred_work_holds_inputs_and_gradients_without_their_graph(operator: Find) -> None:
    inspector = GraphInspector()
    sink: GradSink = inspector
    source = torch.randn(4, 7, requires_grad=True)
    norm, weight = nn.Parameter(torch.ones(7)), nn.Parameter(torch.randn(3, 7))
    y = operator("linear")(source.tanh() * tap(norm, sink), weight, sink=sink)
    y.square().sum().backward()
    assert len(inspector.held) == 3  # x and dy of the product, the gradient of the norm
    assert all(value.grad_fn is None and not value.requires_grad for value in inspector.held)


def test_a_tapped_parameter_is_itself_and_its_gradient_goes_to_the_sink(sink: WeightGrads) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    assert tap(parameter, None) is parameter
    for _ in range(2):
        (tap(parameter, sink) ** 3).sum().backward()
    assert parameter.grad is None
    assert sink.main_grad(parameter).tolist() == [6.0, 24.0]


def test_a_frozen_weight_defers_nothing(operator: Find) -> None:
    inspector = GraphInspector()
    x = torch.randn(4, 7, requires_grad=True)
    operator("linear")(x, torch.randn(3, 7), sink=inspector).sum().backward()
    assert x.grad is not None
    assert inspector.held == []
