"""Rows travel to experts and back: sort_pairs, gather_rows, weighted_sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from pith.layer.balance import count_pairs
from pith.ops.pairs import Pairs

Find = Callable[..., Callable[..., Any]]

IDS_RK = torch.tensor([[5, 0], [2, 5], [0, 3], [5, 2], [1, 0]])
SHARES = [(0, 6), (0, 3), (3, 3), (4, 1), (2, 2)]


def pairs_of(operator: Find, first: int, count: int) -> Pairs:
    counts_e = count_pairs(IDS_RK.flatten(), first_expert=first, num_experts=count)
    return operator("sort_pairs")(IDS_RK, counts_e, first_expert=first, num_experts=6)


@pytest.mark.parametrize(("first", "count"), SHARES)
def test_pairs_come_sorted_by_expert_then_row_and_foreign_ones_are_skipped(
    operator: Find, first: int, count: int
) -> None:
    pairs = pairs_of(operator, first, count)
    flat = IDS_RK.flatten().tolist()
    wanted = sorted((e, p) for p, e in enumerate(flat) if first <= e < first + count)
    assert pairs.pair_P.tolist() == [p for _, p in wanted]
    assert pairs.row_P.tolist() == [p // 2 for _, p in wanted]
    assert pairs.counts_e.tolist() == [flat.count(e) for e in range(first, first + count)]
    for p, position in enumerate(pairs.position_RK.flatten().tolist()):
        assert pairs.pair_P.tolist()[position : position + 1] in ([p], [])


@pytest.mark.parametrize(("first", "count"), SHARES)
def test_rows_come_back_as_the_weighted_sum_of_their_local_slots(
    operator: Find, first: int, count: int, generator: torch.Generator
) -> None:
    pairs = pairs_of(operator, first, count)
    rows_PD = torch.randn(pairs.pair_P.shape[0], 3, generator=generator, dtype=torch.float64)
    weights_RK = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    wanted = torch.zeros(5, 3, dtype=torch.float64)
    for row, pair, value in zip(pairs.row_P, pairs.pair_P, rows_PD, strict=True):
        wanted[row] += weights_RK.flatten()[pair] * value
    found = operator("weighted_sum")(rows_PD, weights_RK, pairs)
    torch.testing.assert_close(found, wanted)
    leaves = (rows_PD.requires_grad_(), weights_RK.requires_grad_())
    assert gradcheck(lambda *both: operator("weighted_sum")(*both, pairs), leaves)


@pytest.mark.parametrize(("first", "count"), SHARES)
def test_gathered_rows_and_their_gradients(
    operator: Find, first: int, count: int, generator: torch.Generator
) -> None:
    pairs = pairs_of(operator, first, count)
    x_RD = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    gather_rows = operator("gather_rows")
    assert torch.equal(gather_rows(x_RD, pairs), x_RD[pairs.row_P])
    assert gradcheck(lambda x: gather_rows(x, pairs), (x_RD,))


def test_a_rank_whose_experts_nobody_chose_returns_zeros(operator: Find) -> None:
    pairs = pairs_of(operator, 4, 1)
    x_RD = torch.ones(5, 3, requires_grad=True)
    weights_RK = torch.ones(5, 2, requires_grad=True)
    rows_PD = operator("gather_rows")(x_RD, pairs)
    out_RD = operator("weighted_sum")(rows_PD, weights_RK, pairs)
    out_RD.sum().backward()
    assert rows_PD.shape == (0, 3)
    for tensor in (out_RD, x_RD.grad, weights_RK.grad):
        assert tensor.eq(0).all()


def test_narrow_rows_are_summed_in_float32(operator: Find) -> None:
    ids_RK = torch.arange(3).unsqueeze(0)
    pairs = operator("sort_pairs")(ids_RK, torch.ones(3).long(), first_expert=0, num_experts=3)
    rows_PD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 = 256 in bf16
    found: Tensor = operator("weighted_sum")(rows_PD, torch.ones(1, 3), pairs)
    assert found.dtype == torch.bfloat16
    assert found.item() == 258.0
