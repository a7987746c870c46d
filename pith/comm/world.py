"""The ranks that train together, and what they agree on."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pith.errors import PithError, RunFailedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers. A world of one needs no process group."""

    rank: int
    size: int
    device: torch.device
    backend: str = "gloo"  # what carries tensors of `device`
    timeout: timedelta | None = None  # of one operation, in every group; None: torch's default

    @property
    def staged(self) -> bool:
        """Whether pipeline messages pass through host memory: gloo cannot send CUDA tensors."""
        return self.device.type == "cuda" and self.backend == "gloo"

    @classmethod
    def joined(
        cls, device: torch.device, *, backend: str = "gloo", timeout: timedelta | None = None
    ) -> "World":
        """The world of the default process group, or a world of one."""
        if not dist.is_initialized():
            return cls(0, 1, device, backend, timeout)
        return cls(dist.get_rank(), dist.get_world_size(), device, backend, timeout)

    def group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group of the ranks `members`, None on other ranks; every rank calls it.

        torch gives a new group its own default timeout, not that of the world.
        """
        group = dist.new_group(list(members), timeout=self.timeout)
        return group if isinstance(group, dist.ProcessGroup) and self.rank in members else None

    def partition(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The group of this rank among `groups`, which together hold every rank once."""
        made = [self.group(members) for members in groups]
        (mine,) = (group for group in made if group is not None)
        return mine

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, on the host (every world carries host tensors)."""
        total = values.to("cpu", copy=True)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def together(
        self, action: Callable[[], T], *, group: dist.ProcessGroup | None = None
    ) -> list[T]:
        """What `action` returns on each rank, by rank; every rank calls it.

        A PithError that it raises on any rank is raised on all of them: of the first such rank.
        `group` is one of all ranks over gloo, the default group without it.
        """
        outcome: T | PithError
        try:
            outcome = action()
        except PithError as error:
            outcome = error
        outcomes: list[T | PithError | None] = [outcome]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=group)
        for found in outcomes:
            if isinstance(found, PithError):
                raise found
        return cast(list[T], outcomes)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum(torch.zeros(1))

    def agree(self, what: str, text: str, *, among: Sequence[int] | None = None) -> None:
        """Stop unless the ranks `among` (all of them) hold the same `text`; every rank calls it.

        Raises RunFailedError naming the ranks.
        """
        digest = hashlib.sha256(text.encode()).digest()[:7]  # 56 bits: exact in int64
        number = int.from_bytes(digest, "big")
        mine = torch.zeros(self.size, dtype=torch.int64)
        mine[self.rank] = number
        everyone: list[int] = self.sum(mine).tolist()
        first, *others = range(self.size) if among is None else among
        differing = [rank for rank in others if everyone[rank] != everyone[first]]
        if differing:
            raise RunFailedError(
                "ranks.disagree",
                what=f"the ranks hold different values of the {what}",
                found=f"ranks {differing} differ from rank {first}",
                wanted=f"the same on {'every rank' if among is None else f'ranks {list(among)}'}",
                next_step="start every rank with the same recipe, files and pith version",
            )
