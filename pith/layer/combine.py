"""Partial sums back to the ranks of their tokens, and their gradients out again."""

from dataclasses import dataclass

from torch import Tensor

from pith.comm.exchange import Pending, Route, Rows
from pith.layer.dispatch import move
from pith.layer.protocol import Parts


def combine(partial_RD: Tensor, route: Route, parts: Parts) -> Pending[Tensor]:
    """Launch the sum over ranks of what the experts made of each token: [R, D] -> [T, D]."""
    launch, launch_backward = route.reduce_tokens, route.gather_tokens
    return _Only(move((partial_RD,), "combine", launch, launch_backward, parts))


def combine_backward(summed_TD: Tensor, route: Route, parts: Parts) -> Pending[Tensor]:
    """Launch the way of its gradient to the experts: [T, D] -> [R, D]."""
    launch = parts.stopwatch.launch
    return _Only(launch("combine-backward", lambda: route.gather_tokens(summed_TD)))


@dataclass(frozen=True, slots=True)
class _Only:
    moving: Pending[Rows]

    def wait(self) -> Tensor:
        (rows,) = self.moving.wait()
        return rows
