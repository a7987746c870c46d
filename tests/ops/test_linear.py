"""linear, embedding and tap: right products, and gradients that a sink receives."""

from collections.abc import Callable
from typing import Any

import pytest
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


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_linear_and_its_gradients_equal_the_formula(
    operator: Find, sink: WeightGrads, implementation: str, generator: torch.Generator
) -> None:
    linear = operator("linear", implementation)
    x = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(3, 7, generator=generator, dtype=torch.float64))
    dy = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    y = linear(x, weight, sink=sink)
    y.backward(dy)
    assert weight.grad is None
    assert torch.count_nonzero(sink.main_grad(weight)) == 0  # deferred until asked for
    sink.run_fresh()
    torch.testing.assert_close(y, torch.einsum("bsd,fd->bsf", x, weight))
    torch.testing.assert_close(x.grad, torch.einsum("bsf,fd->bsd", dy, weight))
    torch.testing.assert_close(sink.main_grad(weight), torch.einsum("bsf,bsd->fd", dy, x))


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_bf16_weight_gradients_accumulate_in_float32(
    operator: Find, sink: WeightGrads, implementation: str, generator: torch.Generator
) -> None:
    linear = operator("linear", implementation)
    weight = nn.Parameter(torch.randn(8, 16, generator=generator).bfloat16())
    wanted = torch.zeros(8, 16, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(4, 16, generator=generator).bfloat16().requires_grad_()
        dy = torch.randn(4, 8, generator=generator).bfloat16()
        y = linear(x, weight, sink=sink)
        assert y.dtype == torch.bfloat16
        y.backward(dy)
        sink.run_fresh()
        wanted += dy.double().t() @ x.detach().double()
    found = sink.main_grad(weight)
    assert found.dtype == torch.float32
    assert (found.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_a_wide_input_makes_a_wide_product_from_a_narrow_weight(
    operator: Find, sink: WeightGrads, generator: torch.Generator
) -> None:
    weight = nn.Parameter(torch.randn(8, 16, generator=generator).bfloat16())
    x = torch.randn(4, 16, generator=generator, requires_grad=True)
    for implementation in ("reference", "library"):
        y = operator("linear", implementation)(x, weight, sink=sink)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, x @ weight.float().t())


def test_embedding_gradients_sum_repeated_ids(
    operator: Find, sink: WeightGrads, generator: torch.Generator
) -> None:
    weight = nn.Parameter(torch.randn(6, 3, generator=generator, dtype=torch.float64))
    ids = torch.tensor([[1, 4, 1], [1, 0, 4]])
    rows = operator("embedding")(ids, weight, sink=sink)
    dy = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    rows.backward(dy)
    sink.run_fresh()
    wanted = torch.zeros(6, 3, dtype=torch.float64)
    for position in range(6):
        wanted[ids.flatten()[position]] += dy.view(6, 3)[position]
    assert torch.equal(rows.detach(), weight.detach()[ids])
    torch.testing.assert_close(sink.main_grad(weight), wanted)


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
