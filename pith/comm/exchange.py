"""Moves tokens to the ranks that hold their experts, and partial sums back.

Shape letters: T this rank's tokens, R the rows that it receives, K top-k.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Rows = tuple[Tensor, ...]


class Pending(Protocol[T_co]):
    """A communication that has been launched."""

    def wait(self) -> T_co:
        """The result; stream-ordered on CUDA, blocking on gloo."""
        ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """A communication that needed none."""

    value: T

    def wait(self) -> T:
        return self.value


class Route(Protocol):
    """The way of one layer's tokens in one micro-batch. Each of the two is the other's backward."""

    def gather_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[T, ...] tensors on each rank -> [R, ...]: the rows this rank's experts may need."""
        ...

    def reduce_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[R, ...] partial results -> [T, ...]: summed over ranks, on the token's own rank.

        The sum is taken in the order of the ranks, in float32 or wider, then cast back.
        """
        ...


class Exchange(Protocol):
    """Finds routes; the ranks that share out one set of experts call it at the same time."""

    def route(self, ids_TK: Tensor) -> Route:
        """The route of tokens that chose the global experts `ids_TK` [T, K] int64."""
        ...


class LocalExchange:
    """All experts are on this rank: nothing moves."""

    def route(self, ids_TK: Tensor) -> Route:
        return _Staying()


class _Staying:
    def gather_tokens(self, *rows: Tensor) -> Pending[Rows]:
        return Ready(rows)

    def reduce_tokens(self, *rows: Tensor) -> Pending[Rows]:
        return Ready(rows)
