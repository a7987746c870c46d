"""The balance loss rides on the router weights and reaches all probabilities, once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.layer.balance import balance, count_pairs
from pith.layer.protocol import Context
from pith.ops import choose


def by_formula(probs_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
    """The sequence balance loss in loops, float64."""
    num_sequences, length, num_experts = probs_BSE.shape
    total = torch.zeros((), dtype=torch.float64)
    for b in range(num_sequences):
        for e in range(num_experts):
            fraction = (ids_BSK[b] == e).sum().item() / ids_BSK[b].numel()
            probability = sum(probs_BSE[b, s, e] for s in range(length)) / length
            total = total + num_experts * fraction * probability
    return total / num_sequences


@pytest.fixture
def routed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of 3 sequences of 5 tokens over 6 experts, and what the router made of them."""
    logits = torch.randn(15, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits.requires_grad_()
    return (logits, *choose("cpu").topk_route(logits, k=2, normalize=True))


def test_value_gradient_and_load_equal_the_formula(
    routed: tuple[Tensor, Tensor, Tensor, Tensor],
    make_context: Callable[..., Context],
    records: Any,
) -> None:
    logits, probs_TE, weights_TK, ids_TK = routed
    upstream = torch.randn(15, 2, dtype=torch.float64)
    ridden = balance(weights_TK, probs_TE, ids_TK, make_context(5, balance_scale=0.37), layer=4)
    assert torch.equal(ridden, weights_TK)
    ridden.backward(upstream, retain_graph=True)
    found, logits.grad = logits.grad, None

    loss = by_formula(logits.softmax(-1).view(3, 5, 6), ids_TK.view(3, 5, 2))
    (0.37 * loss + (weights_TK * upstream).sum()).backward()
    torch.testing.assert_close(found, logits.grad, rtol=1e-12, atol=1e-14)
    (layer, load, value) = records.entries[0]
    assert layer == 4
    assert load == [(ids_TK == e).sum().item() for e in range(6)]
    assert sum(load) == 15 * 2
    assert value == pytest.approx(loss.item(), rel=1e-12)


def test_every_probability_receives_a_gradient(
    make_context: Callable[..., Context],
) -> None:
    probs_TE = torch.full((4, 5), 0.2, requires_grad=True)
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]])
    weights_TK = torch.full((4, 2), 0.2, requires_grad=True)
    context = make_context(4, balance_scale=2.0)
    balance(weights_TK, probs_TE, ids_TK, context, layer=0).sum().backward()
    fractions = torch.tensor([4, 1, 1, 1, 1]) / 8
    torch.testing.assert_close(probs_TE.grad, (2.0 * 5 * fractions / 4).expand(4, 5))
    assert weights_TK.grad.eq(1).all()


def test_perfect_balance_is_one_and_collapse_is_the_number_of_experts(
    make_context: Callable[..., Context], records: Any
) -> None:
    even = torch.arange(4).view(4, 1)
    balance(torch.ones(4, 1), torch.full((4, 4), 0.25), even, make_context(4), layer=0)
    collapsed = torch.zeros(4, 4)
    collapsed[:, 2] = 1
    balance(torch.ones(4, 1), collapsed, torch.full((4, 1), 2), make_context(4), layer=1)
    assert records.entries == [(0, [1, 1, 1, 1], 1.0), (1, [0, 0, 4, 0], 4.0)]


def test_a_scale_of_zero_records_and_sends_no_gradient(
    routed: tuple[Tensor, Tensor, Tensor, Tensor],
    make_context: Callable[..., Context],
    records: Any,
) -> None:
    _, probs_TE, weights_TK, ids_TK = routed
    assert balance(weights_TK, probs_TE, ids_TK, make_context(5), layer=0) is weights_TK
    assert len(records.entries) == 1


def test_counting_skips_foreign_experts() -> None:
    ids = torch.tensor([[0, 3, 3], [5, 2, 0]])
    assert count_pairs(ids, first_expert=0, num_experts=6).tolist() == [
        [1, 0, 0, 2, 0, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert count_pairs(ids.flatten(), first_expert=2, num_experts=2).tolist() == [1, 2]
