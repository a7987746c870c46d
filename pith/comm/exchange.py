"""Moves tokens to the ranks that hold their experts, and partial sums back."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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


class LocalExchange:
    """All experts are on this rank: nothing moves."""

    def gather_tokens(self, x_TD: Tensor) -> Pending[Tensor]:
        """[T, ...] -> [T, ...], the same rows."""
        return Ready(x_TD)

    def reduce_tokens(self, x_RD: Tensor) -> Pending[Tensor]:
        """[T, ...] -> [T, ...], the same rows."""
        return Ready(x_RD)
