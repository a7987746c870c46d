"""Experts: shares of them add up to the whole, and starving ones stay at zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pith.layer.balance import count_pairs
from pith.layer.experts import Experts
from pith.layer.protocol import Parts, Received

MakeParts = Callable[..., Parts]


def build(parts: Parts, dtype: torch.dtype = torch.float64) -> Experts:
    experts = Experts(6, intermediate_size=4, num_experts=8, parts=parts, dtype=dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    return experts


def receive(x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor, parts: Parts) -> Received:
    counts_e = count_pairs(
        ids_RK.flatten(), first_expert=parts.first_expert, num_experts=parts.num_local_experts
    )
    return Received(x_RD, ids_RK, weights_RK, counts_e)


def by_token(experts: Experts, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Every token through each of its experts, one at a time."""
    gate, up, down = (
        module.weight for module in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    rows = []
    for x, ids, weights in zip(x_RD, ids_RK, weights_RK, strict=True):
        parts = [
            w * (down[e] @ (torch.nn.functional.silu(gate[e] @ x) * (up[e] @ x)))
            for e, w in zip(ids, weights, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


ROUTINGS = {
    "spread": [[0, 5], [7, 1], [3, 2], [6, 4], [5, 0]],
    "first starves": [[1, 5], [7, 1], [3, 2], [6, 4], [5, 1]],
    "middle starve": [[0, 7], [7, 1], [0, 6], [6, 1], [0, 1]],
    "last starves": [[0, 5], [6, 1], [3, 2], [6, 4], [5, 0]],
    "all but one starve": [[4], [4], [4], [4], [4]],
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_output_and_gradients_equal_a_loop_over_tokens_and_starving_experts_get_zero(
    make_parts: MakeParts, generator: torch.Generator, ids: list[list[int]]
) -> None:
    parts = make_parts(8)
    experts, ids_RK = build(parts), torch.tensor(ids)
    x_RD = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights_RK = torch.rand(ids_RK.shape, generator=generator, dtype=torch.float64)
    weights_RK.requires_grad_()
    results = []
    for naive in (False, True):
        if naive:
            out_RD = by_token(experts, x_RD, ids_RK, weights_RK)
        else:
            out_RD = experts.sum_weighted(receive(x_RD, ids_RK, weights_RK, parts))
        leaves = (x_RD, weights_RK, *experts.parameters())
        results.append((out_RD, *torch.autograd.grad(out_RD.square().sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for e in set(range(8)) - set(ids_RK.flatten().tolist()):
        assert all(grad[e].eq(0).all() for grad in results[0][3:])


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_partial_sums_of_all_shares_add_up_to_the_whole(
    make_parts: MakeParts, generator: torch.Generator, ep: int
) -> None:
    whole = build(make_parts(8))
    ids_RK = torch.tensor(ROUTINGS["first starves"])
    x_RD = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights_RK = torch.rand(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    out_RD = whole.sum_weighted(receive(x_RD, ids_RK, weights_RK, whole.parts))
    out_RD.backward(dy)
    wanted = (x_RD.grad, weights_RK.grad, out_RD)
    x_RD.grad = weights_RK.grad = None

    total_RD = torch.zeros_like(out_RD)
    for rank in range(ep):
        parts = make_parts(8 // ep, first=rank * 8 // ep)
        share, mine = build(parts), slice(rank * 8 // ep, (rank + 1) * 8 // ep)
        with torch.no_grad():
            for parameter, full in zip(share.parameters(), whole.parameters(), strict=True):
                parameter.copy_(full[mine])
        partial_RD = share.sum_weighted(receive(x_RD, ids_RK, weights_RK, parts))
        partial_RD.backward(dy)
        total_RD += partial_RD.detach()
        for parameter, full in zip(share.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, full.grad[mine])
    torch.testing.assert_close((x_RD.grad, weights_RK.grad, total_RD), wanted)
