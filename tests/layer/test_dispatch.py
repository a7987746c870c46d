"""Dispatch and combine: each the other's backward, by hand and under autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from pith.comm.exchange import LocalExchange, Pending, Ready
from pith.layer.combine import combine, combine_backward
from pith.layer.dispatch import dispatch, dispatch_backward
from pith.layer.protocol import Carry, Exchange, Parts, Routed

MakeParts = Callable[..., Parts]


class Mirror:
    """As if a second rank held the same tokens, negated."""

    def gather_tokens(self, x_TD: Tensor) -> Pending[Tensor]:
        return Ready(torch.cat((x_TD, -x_TD)))

    def reduce_tokens(self, x_RD: Tensor) -> Pending[Tensor]:
        own, other = x_RD.chunk(2)
        return Ready(own - other)


def route(tokens_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Routed:
    return Routed(tokens_TD, Carry(tokens_TD), ids_TK, weights_TK)


@pytest.fixture
def leaves(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [3, 4] and weights [3, 2]."""
    shapes = ((3, 4), (3, 2))
    tokens_TD, weights_TK = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    return tokens_TD, weights_TK


@pytest.mark.parametrize("exchange", [LocalExchange(), Mirror()])
def test_autograd_through_dispatch_and_combine_equals_finite_differences(
    make_parts: MakeParts, leaves: tuple[Tensor, Tensor], exchange: Exchange
) -> None:
    parts = make_parts(4, exchange=exchange)
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 0]])

    def there_and_back(tokens_TD: Tensor, weights_TK: Tensor) -> Tensor:
        received = dispatch(route(tokens_TD, weights_TK, ids_TK), parts).wait()
        partial_RD = received.tokens_RD**3 * received.weights_RK.sum(1, keepdim=True)
        return combine(partial_RD, parts).wait()

    assert gradcheck(there_and_back, leaves)


def test_the_ways_back_by_hand_equal_autograd(
    make_parts: MakeParts, leaves: tuple[Tensor, Tensor], generator: torch.Generator
) -> None:
    parts = make_parts(4, exchange=Mirror())
    received = dispatch(route(*leaves, torch.zeros(3, 2).long()), parts).wait()
    dtokens_RD = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    dweights_RK = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    outputs = (received.tokens_RD, received.weights_RK)
    wanted = torch.autograd.grad(outputs, leaves, (dtokens_RD, dweights_RK))
    found = dispatch_backward(dtokens_RD, dweights_RK, parts).wait()
    torch.testing.assert_close(found, wanted)

    partial_RD = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    dsummed_TD = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    combine(partial_RD, parts).wait().backward(dsummed_TD)
    assert torch.equal(combine_backward(dsummed_TD, parts).wait(), partial_RD.grad)


def test_only_pairs_of_local_experts_are_counted(
    make_parts: MakeParts, leaves: tuple[Tensor, Tensor]
) -> None:
    ids_TK = torch.tensor([[0, 5], [2, 3], [2, 0]])
    routed = route(leaves[0].detach(), leaves[1].detach(), ids_TK)
    received = dispatch(routed, make_parts(3, first=2)).wait()
    assert received.counts_e.tolist() == [2, 1, 0]
    assert torch.equal(received.ids_RK, ids_TK)
    assert not received.tokens_RD.requires_grad
