"""attention, rope, rms_norm, swiglu: equal to formulas written another way."""

from collections.abc import Callable
from math import exp, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

Find = Callable[..., Callable[..., Any]]


def one_query_at_a_time(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal grouped attention in loops; [B, S, H, d]."""
    out = torch.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            for h in range(q.shape[2]):
                keys, values = k[b, : s + 1, h // share], v[b, : s + 1, h // share]
                powers = torch.tensor([exp(scale * float(key @ q[b, s, h])) for key in keys])
                out[b, s, h] = (powers.double() / powers.sum()) @ values
    return out


@pytest.mark.parametrize("implementation", ["reference", "library"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_attention_equals_a_loop_over_queries(
    *, operator: Find, implementation: str, num_heads: int, num_kv_heads: int,
    generator: torch.Generator,
) -> None:  # fmt: skip
    q = torch.randn(2, 6, num_heads, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 6, num_kv_heads, 8, generator=generator, dtype=torch.float64)
    found = operator("attention", implementation)(q, k, v, scale=0.3)
    torch.testing.assert_close(found, one_query_at_a_time(q, k, v, 0.3), rtol=1e-6, atol=1e-7)


def test_attention_gradients_of_both_implementations_agree(
    operator: Find, generator: torch.Generator
) -> None:
    dy = torch.randn(2, 9, 4, 8, generator=generator, dtype=torch.float64)
    grads = []
    for implementation in ("reference", "library"):
        leaves = [
            torch.randn(2, 9, heads, 8, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(heads)).requires_grad_()
            for heads in (4, 2, 2)
        ]  # fmt: skip
        operator("attention", implementation)(*leaves, scale=0.35).backward(dy)
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_attention_never_sees_the_future(operator: Find, implementation: str) -> None:
    attention = operator("attention", implementation)
    q, k, v = torch.randn(3, 1, 8, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    before = attention(q, k, v, scale=0.5)
    k[:, 5:], v[:, 5:] = 100.0, -100.0
    after = attention(q, k, v, scale=0.5)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_rope_turns_complex_numbers(operator: Find, generator: torch.Generator) -> None:
    x = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64)
    angles = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    twice = angles.repeat(1, 1, 2)
    found = operator("rope")(x, twice.cos(), twice.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(2)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("implementation", ["reference", "library"])
def test_rms_norm_equals_its_formula(operator: Find, implementation: str) -> None:
    rms_norm = operator("rms_norm", implementation)
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, 0.5], dtype=torch.float64, requires_grad=True)
    found = rms_norm(x, weight, 1e-6)
    scale = 1 / sqrt(12.5 + 1e-6)
    wanted = torch.tensor([[6 * scale, -2 * scale], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    assert gradcheck(lambda *leaves: rms_norm(*leaves, 1e-3), (x, weight))


def test_narrow_inputs_are_computed_in_float32_and_rounded_once(
    operator: Find, generator: torch.Generator
) -> None:
    x = torch.randn(64, 32, generator=generator).bfloat16()
    weight = torch.randn(32, generator=generator).bfloat16()
    wide = operator("rms_norm")(x.double(), weight.double(), 1e-6)
    assert torch.equal(operator("rms_norm")(x, weight, 1e-6), wide.bfloat16())
    gate, up = x.chunk(2, dim=-1)
    wide = gate.double() * gate.double().sigmoid() * up.double()
    assert torch.equal(operator("swiglu")(gate, up), wide.bfloat16())


def test_swiglu_equals_its_formula(operator: Find, generator: torch.Generator) -> None:
    gate, up = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    found = operator("swiglu")(gate, up)
    torch.testing.assert_close(found, gate / (1 + (-gate).exp()) * up)
