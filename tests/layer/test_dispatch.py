"""Dispatch and combine: each the other's backward, by hand, under autograd and between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import gradcheck

from pith.comm.collectives import CollectiveExchange
from pith.comm.exchange import Exchange, LocalExchange, Pending, Ready, Route, Rows
from pith.comm.splits import SplitExchange
from pith.layer.combine import combine, combine_backward
from pith.layer.dispatch import dispatch, dispatch_backward
from pith.layer.experts import Experts
from pith.layer.protocol import Carry, Parts, Routed
from pith.ops import choose


class Mirror:
    """As if a second rank held the same tokens, negated; ids stay as they are."""

    def route(self, ids_TK: Tensor) -> Route:
        return self

    def gather_tokens(self, *rows: Tensor) -> Pending[Rows]:
        return Ready(tuple(torch.cat((x, -x if x.is_floating_point() else x)) for x in rows))

    def reduce_tokens(self, *rows: Tensor) -> Pending[Rows]:
        halves = (x.chunk(2) for x in rows)
        return Ready(tuple(own - other for own, other in halves))


def make_parts(count: int, *, first: int = 0, exchange: Exchange | None = None) -> Parts:
    return Parts(choose("cpu"), exchange or LocalExchange(), None, count, first)


def routed(tokens_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Routed:
    return Routed(tokens_TD, Carry(tokens_TD), ids_TK, weights_TK)


@pytest.fixture
def leaves() -> tuple[Tensor, Tensor]:
    """Tokens [3, 4] and weights [3, 2]."""
    tokens_TD, weights_TK = (
        draw(number, *shape).requires_grad_() for number, shape in enumerate(((3, 4), (3, 2)))
    )
    return tokens_TD, weights_TK


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("exchange", [LocalExchange(), Mirror()])
def test_autograd_through_dispatch_and_combine_equals_finite_differences(
    leaves: tuple[Tensor, Tensor], exchange: Exchange
) -> None:
    parts = make_parts(4, exchange=exchange)
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 0]])

    def there_and_back(tokens_TD: Tensor, weights_TK: Tensor) -> Tensor:
        received = dispatch(routed(tokens_TD, weights_TK, ids_TK), parts).wait()
        partial_RD = received.tokens_RD**3 * received.weights_RK.sum(1, keepdim=True)
        return combine(partial_RD, received.route, parts).wait()

    assert gradcheck(there_and_back, leaves)


def test_the_ways_back_by_hand_equal_autograd_and_every_way_goes_by_its_phase(
    leaves: tuple[Tensor, Tensor],
) -> None:
    parts, phases = make_parts(4, exchange=Mirror()), []
    parts.stopwatch.notice = phases.append
    received = dispatch(routed(*leaves, torch.zeros(3, 2).long()), parts).wait()
    grads = (draw(2, 6, 4), draw(3, 6, 2))
    outputs = (received.tokens_RD, received.weights_RK)
    wanted = torch.autograd.grad(outputs, leaves, grads)
    found = dispatch_backward(*grads, received.route, parts).wait()
    torch.testing.assert_close(found, wanted)

    partial_RD, dsummed_TD = draw(4, 6, 4).requires_grad_(), draw(5, 3, 4)
    combine(partial_RD, received.route, parts).wait().backward(dsummed_TD)
    dpartial_RD = combine_backward(dsummed_TD, received.route, parts).wait()
    assert torch.equal(dpartial_RD, partial_RD.grad)
    wanted_phases = ["route", "dispatch", "dispatch-backward", "combine", "combine-backward"]
    assert phases == wanted_phases
    assert set(parts.stopwatch.lap()) == set(phases)


def test_only_pairs_of_local_experts_are_counted(leaves: tuple[Tensor, Tensor]) -> None:
    ids_TK = torch.tensor([[0, 5], [2, 3], [2, 0]])
    tokens_TD, weights_TK = (leaf.detach() for leaf in leaves)
    received = dispatch(routed(tokens_TD, weights_TK, ids_TK), make_parts(3, first=2)).wait()
    assert received.counts_e.tolist() == [2, 1, 0]
    assert torch.equal(received.ids_RK, ids_TK)
    assert not received.tokens_RD.requires_grad


ROUTINGS = {  # of four experts, on two ranks: [rank, T, K]
    "spread": [[[0, 3], [2, 1], [1, 0]], [[3, 2], [0, 2], [1, 3]]],
    "the second rank starves": [[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0]]],
    "all go to the other rank": [[[2, 3], [3, 2], [2, 3]], [[1, 0], [0, 1], [1, 0]]],
}


def there_and_back(parts: Parts, ids_TK: Tensor, *, rows: slice) -> dict[str, Tensor]:
    """Outputs of tokens `rows` of six, and gradients of tokens, weights and local experts."""
    experts = Experts(4, intermediate_size=3, num_experts=4, parts=parts, dtype=torch.float64)
    mine = slice(parts.first_expert, parts.first_expert + parts.num_local_experts)
    for number, parameter in enumerate(experts.parameters()):
        nn.init.zeros_(parameter).data += draw(number, 4, *parameter.shape[1:])[mine]
    tokens_TD, weights_TK = (draw(seed, 6, seed)[rows].requires_grad_() for seed in (4, 2))
    received = dispatch(routed(tokens_TD, weights_TK, ids_TK), parts).wait()
    summed_TD = combine(experts.sum_weighted(received), received.route, parts).wait()
    (summed_TD * draw(7, 6, 4)[rows]).sum().backward()
    found = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return found | {"out": summed_TD.detach(), "tokens": tokens_TD.grad, "weights": weights_TK.grad}


def run_share() -> dict[str, dict[str, Tensor]]:
    rank, found = dist.get_rank(), {}
    rows = slice(3 * rank, 3 * rank + 3)
    for exchange in (CollectiveExchange(dist.group.WORLD), SplitExchange(dist.group.WORLD, 4)):
        parts = make_parts(2, first=2 * rank, exchange=exchange)
        for case, ids in ROUTINGS.items():
            ids_TK = torch.tensor(ids[rank])
            found[f"{type(exchange).__name__}, {case}"] = there_and_back(parts, ids_TK, rows=rows)
    dist.barrier()
    return found


def test_two_ranks_give_the_outputs_and_gradients_of_one_with_all_experts(run_ranks: Any) -> None:
    shares = run_ranks(2, run_share)
    for name in shares[0]:
        ids_TK = torch.tensor(ROUTINGS[name.split(", ")[1]]).flatten(0, 1)
        whole = there_and_back(make_parts(4), ids_TK, rows=slice(None))
        assert all(whole[key].ne(0).any() for key in whole), "nothing to compare"
        for key, wanted in whole.items():  # both ranks' tokens, or both ranks' experts
            found = torch.cat([share[name][key] for share in shares])
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")
