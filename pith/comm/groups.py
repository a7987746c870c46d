"""The process groups of a run, made in one order on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from pith.comm.channels import open_channels
from pith.comm.world import World
from pith.plan.mesh import Axis, Mesh


@dataclass(slots=True)
class Groups:
    """Opens groups of the mesh; groups of the same ranks are one. Every rank asks for the same
    groups in the same order, and closes them when the model is done with."""

    mesh: Mesh
    world: World
    _sealed: bool = False
    _by_ranks: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = field(default_factory=dict)
    _others: list[dist.ProcessGroup] = field(default_factory=list)

    def along(self, *axes: Axis) -> dist.ProcessGroup:
        """This rank's group of those whose members differ on `axes` alone."""
        partition = self.mesh.partition(*axes)
        if partition not in self._by_ranks:
            assert not self._sealed, f"the group along {axes} should have been opened before"
            self._by_ranks[partition] = self.world.partition(partition)
        return self._by_ranks[partition]

    def pair_up(self, first: int, last: int) -> dist.ProcessGroup | None:
        """The group of the pipeline ranks `first` and `last` in this rank's pipeline, if in it."""
        found = None
        for pipeline in self.mesh.partition("pp"):
            found = self.world.group([pipeline[first], pipeline[last]]) or found
        self._others += [] if found is None else [found]
        return found

    def channels(
        self, pairs: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """One warm group per directed pair of pipeline ranks, in this rank's pipeline."""
        found: dict[tuple[int, int], dist.ProcessGroup] = {}
        for pipeline in self.mesh.partition("pp"):
            found |= open_channels(pairs, pipeline=pipeline, world=self.world)
        self._others += found.values()
        return found

    def seal(self) -> None:
        """No group is opened from here on: in the middle of a step some ranks would not come."""
        self._sealed = True

    def close(self) -> None:
        """Let go of all groups."""
        for group in (*self._by_ranks.values(), *self._others):
            dist.destroy_process_group(group)
        self._by_ranks.clear()
        self._others.clear()


def summing(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """A sum over the ranks of `group`; its argument is kept."""

    def total(values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    return total
