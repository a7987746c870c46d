"""grouped_linear equals one product per row, however the rows fall on the experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pith.engine.weight_grads import WeightGrads

Find = Callable[..., Callable[..., Any]]
Near = Callable[[Tensor, Tensor, float], None]

COUNTS = {
    "kernel edges": (0, 1, 127, 128, 129),
    "all on one": (0, 0, 385, 0, 0),
    "first empty": (0, 3, 4, 5, 6),
    "middle empty": (3, 4, 0, 5, 6),
    "last empty": (3, 4, 5, 6, 0),
    "nothing": (0, 0, 0, 0, 0),
}
IMPLEMENTATIONS = [("reference", torch.float64, 1e-12), ("library", torch.float32, 1e-5)]


def by_row(x_PD: Tensor, weight_eFD: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Each row times the weight of its expert; nothing for rows past the last expert."""
    expert_P = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    used = expert_P.shape[0]
    y_PF = torch.einsum("pd,pfd->pf", x_PD[:used], weight_eFD[expert_P])
    return torch.cat([y_PF, x_PD.new_zeros(x_PD.shape[0] - used, weight_eFD.shape[1])])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("num_past", [0, 9])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), IMPLEMENTATIONS)
@pytest.mark.parametrize("deferred", [True, False])
def test_equals_a_product_per_row_in_poisoned_memory_twice_in_a_row(
    *,
    operator: Find,
    assert_near: Near,
    sink: WeightGrads,
    poisoned_memory: Callable[[int], None],
    generator: torch.Generator,
    counts: tuple[int, ...],
    num_past: int,
    implementation: str,
    dtype: torch.dtype,
    tolerance: float,
    deferred: bool,
) -> None:
    grouped_linear = operator("grouped_linear", implementation)
    num_rows = sum(counts) + num_past
    weight = nn.Parameter(torch.randn(5, 8, 12, generator=generator, dtype=dtype))
    wanted_weight = weight.detach().clone().requires_grad_()
    for _ in range(2):
        x = torch.randn(num_rows, 12, generator=generator, dtype=dtype)
        dy = torch.randn(num_rows, 8, generator=generator, dtype=dtype)
        clean_x = x.clone().requires_grad_()
        wanted = by_row(clean_x, wanted_weight, counts)
        wanted.backward(dy)
        if num_past:  # rows past the last expert hold rubbish that must not spread
            x[-num_past:] = dy[-num_past:] = float("nan")
        x.requires_grad_()
        poisoned_memory(num_rows * 12)
        found = grouped_linear(x, weight, torch.tensor(counts), sink=sink if deferred else None)
        poisoned_memory(num_rows * 12)
        found.backward(dy)
        sink.run_fresh()
        assert_near(found.detach(), wanted.detach(), tolerance)
        assert_near(x.grad, clean_x.grad, tolerance)
    assert_near(sink.main_grad(weight) if deferred else weight.grad, wanted_weight.grad, tolerance)


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_takes_expanded_gradients_and_strided_rows(
    operator: Find, assert_near: Near, implementation: str, generator: torch.Generator
) -> None:
    grouped_linear = operator("grouped_linear", implementation)
    wide = torch.randn(10, 24, generator=generator)
    weight = nn.Parameter(torch.randn(2, 8, 12, generator=generator))
    x = wide[:, ::2].detach().requires_grad_()
    clean_x = x.detach().clone().requires_grad_()
    grouped_linear(x, weight, torch.tensor([6, 4])).sum().backward()
    found, weight.grad = weight.grad, None
    by_row(clean_x, weight, (6, 4)).sum().backward()
    assert_near(x.grad, clean_x.grad, 1e-5)
    assert_near(found, weight.grad, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_an_expert_without_tokens_gets_a_zero_gradient_not_a_missing_one(
    operator: Find, sink: WeightGrads, implementation: str
) -> None:
    weight = nn.Parameter(torch.ones(3, 8, 12))
    x = torch.ones(4, 12, requires_grad=True)
    operator("grouped_linear", implementation)(
        x, weight, torch.tensor([4, 0, 0]), sink=sink
    ).sum().backward()
    sink.run_fresh()
    main = sink.main_grad(weight)
    assert main[0].eq(4).all()
    assert main[1:].eq(0).all()


def test_bf16_accumulates_in_float32(
    operator: Find, sink: WeightGrads, assert_near: Near, generator: torch.Generator
) -> None:
    weight = nn.Parameter(torch.randn(2, 8, 16, generator=generator).bfloat16())
    wanted = torch.zeros(2, 8, 16, dtype=torch.float64)
    for _ in range(50):
        x = torch.randn(5, 16, generator=generator).bfloat16().requires_grad_()
        dy = torch.randn(5, 8, generator=generator).bfloat16()
        operator("grouped_linear")(x, weight, torch.tensor([2, 3]), sink=sink).backward(dy)
        sink.run_fresh()
        wanted[0] += dy[:2].double().t() @ x[:2].detach().double()
        wanted[1] += dy[2:].double().t() @ x[2:].detach().double()
    assert_near(sink.main_grad(weight), wanted, 1e-6)
