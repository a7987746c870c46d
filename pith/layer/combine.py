"""Partial sums back to the ranks of their tokens, and their gradients out again."""

from torch import Tensor

from pith.comm.exchange import Pending
from pith.layer.dispatch import move
from pith.layer.protocol import Parts


def combine(partial_RD: Tensor, parts: Parts) -> Pending[Tensor]:
    """Launch the sum over ranks of what the experts made of each token: [R, D] -> [T, D]."""
    return move(partial_RD, parts.exchange.reduce_tokens, parts.exchange.gather_tokens)


def combine_backward(summed_TD: Tensor, parts: Parts) -> Pending[Tensor]:
    """Launch the way of its gradient to the experts: [T, D] -> [R, D]."""
    return parts.exchange.gather_tokens(summed_TD)
