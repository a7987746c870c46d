"""The operators that CUDA runs by default, in bf16, against the reference in float64 on CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pith.engine.weight_grads import WeightGrads
from pith.ops import choose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Near = Callable[[Tensor, Tensor, float], None]
BF16 = 6e-3  # relative error of a result that was rounded to bf16 once or twice


def draw(*shape: int, seed: int) -> Tensor:
    """bf16 values on CUDA."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().cuda()


def check_both_ways(
    name: str, leaves: list[Tensor], assert_near: Near, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of `leaves` on CUDA, and by the reference in float64."""
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        own = [leaf.detach().to(device, dtype).requires_grad_() for leaf in leaves]
        operator = getattr(choose(device, {name: "reference"} if device == "cpu" else {}), name)
        out = operator(*own, **options)
        dy = draw(*out.shape, seed=9).to(device, dtype)
        out.backward(dy)
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in own)])
    for found, wanted in zip(*results, strict=True):
        assert_near(found, wanted, BF16)
    return results[0], results[1]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 4, 128), (4, 4, 64)])
def test_attention(assert_near: Near, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    heads = (num_heads, num_kv_heads, num_kv_heads)
    leaves = [draw(2, 256, h, head_dim, seed=i) for i, h in enumerate(heads)]
    check_both_ways("attention", leaves, assert_near, scale=head_dim**-0.5)


def test_rms_norm_and_swiglu(assert_near: Near) -> None:
    check_both_ways("rms_norm", [draw(64, 2048, seed=0), draw(2048, seed=1)], assert_near, eps=1e-6)
    check_both_ways("swiglu", [draw(64, 768, seed=0), draw(64, 768, seed=1)], assert_near)


def test_linear_accumulates_in_float32(assert_near: Near) -> None:
    linear, sink = choose("cuda").linear, WeightGrads()
    weight = nn.Parameter(draw(768, 2048, seed=0))
    wanted = torch.zeros(768, 2048, dtype=torch.float64)
    for step in range(20):
        x, dy = draw(2, 32, 2048, seed=step).requires_grad_(), draw(2, 32, 768, seed=100 + step)
        y = linear(x, weight, sink=sink)
        y.backward(dy)
        sink.run_fresh()
        assert_near(
            y.detach().cpu(), x.detach().cpu().double() @ weight.detach().cpu().double().t(), BF16
        )
        assert_near(x.grad.cpu(), dy.cpu().double() @ weight.detach().cpu().double(), BF16)
        flat = (dy.cpu().double().flatten(0, 1), x.detach().cpu().double().flatten(0, 1))
        wanted += flat[0].t() @ flat[1]
    assert sink.main_grad(weight).dtype == torch.float32
    assert_near(sink.main_grad(weight).cpu(), wanted, 1e-6)


@pytest.mark.parametrize(
    "counts", [(0, 1, 127, 128, 129), (0, 0, 385, 0, 0), (3, 4, 5, 6, 0), (0, 0, 0, 0, 0)]
)
@pytest.mark.parametrize("num_past", [0, 9])
def test_grouped_linear_in_poisoned_memory(
    assert_near: Near, counts: tuple[int, ...], num_past: int
) -> None:
    operators, sink = choose("cuda"), WeightGrads()
    reference = choose("cpu").grouped_linear
    num_rows = sum(counts) + num_past
    weight = nn.Parameter(draw(5, 64, 128, seed=0))
    wanted_weight = weight.detach().cpu().double().requires_grad_()
    for step in range(2):
        x, dy = draw(num_rows, 128, seed=step), draw(num_rows, 64, seed=100 + step)
        clean_x = x.cpu().double().requires_grad_()
        wanted = reference(clean_x, wanted_weight, torch.tensor(counts))
        wanted.backward(dy.cpu().double())
        if num_past:
            x[-num_past:] = dy[-num_past:] = float("nan")
        poison = [torch.full((num_rows + 640, 128), float("nan")).bfloat16().cuda()] * 8
        del poison
        found = operators.grouped_linear(
            x.requires_grad_(), weight, torch.tensor(counts, device="cuda"), sink=sink
        )
        found.backward(dy)
        sink.run_fresh()
        assert_near(found.detach().cpu(), wanted.detach(), BF16)
        assert_near(x.grad.cpu(), clean_x.grad, BF16)
    assert_near(sink.main_grad(weight).cpu(), wanted_weight.grad, BF16)


def test_rows_travel_to_experts_and_back_with_the_same_bits_twice(assert_near: Near) -> None:
    operators = choose("cuda")
    ids_RK = torch.randint(16, (512, 4), generator=torch.Generator().manual_seed(0)).cuda()
    counts_e = ids_RK.flatten().bincount(minlength=16)
    x, weights = draw(512, 64, seed=0).requires_grad_(), draw(512, 4, seed=1).float()
    weights.requires_grad_()
    results = []
    for _ in range(2):
        x.grad = weights.grad = None
        pairs = operators.sort_pairs(ids_RK, counts_e, first_expert=0, num_experts=16)
        out = operators.weighted_sum(operators.gather_rows(x, pairs), weights, pairs)
        out.backward(draw(512, 64, seed=2))
        results.append((out.detach(), x.grad, weights.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_near(results[0][0].cpu(), (x * weights.sum(1, keepdim=True)).detach().cpu(), BF16)


def test_routing_and_embedding_gradients_equal_those_of_the_cpu(assert_near: Near) -> None:
    logits = torch.randn(4096, 64, generator=torch.Generator().manual_seed(3))
    logits[1024:2048] = (logits[1024:2048] * 4).round() / 4
    own, cpu = (choose(d).topk_route(logits.to(d), k=8, normalize=True) for d in ("cuda", "cpu"))
    assert torch.equal(own[2].cpu(), cpu[2])
    assert_near(own[1].cpu(), cpu[1], 1e-6)

    sink, weight = WeightGrads(), nn.Parameter(draw(50, 64, seed=0))
    ids, dy = torch.arange(4096).cuda() % 50, draw(4096, 64, seed=1)
    choose("cuda").embedding(ids, weight, sink=sink).backward(dy)
    sink.run_fresh()
    wanted = torch.zeros(50, 64, dtype=torch.float64).index_add_(0, ids.cpu(), dy.cpu().double())
    assert_near(sink.main_grad(weight).cpu(), wanted, 1e-6)
