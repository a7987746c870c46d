"""Ranks and their coordinates: pp outermost, then dp, cp, and ep innermost."""

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from pith.errors import Fault, RequestError

# dp is cut in two: `replica` counts copies of the weights, `shard` the ranks that share one.
Axis = Literal["pp", "replica", "shard", "cp", "ep"]
# What one copy of a stage's weights is cut over, experts apart; and all ranks with the same stages.
DENSE_AXES: tuple[Axis, ...] = ("shard", "cp", "ep")
EXPERT_AXES: tuple[Axis, ...] = ("shard", "cp")
DATA_AXES: tuple[Axis, ...] = ("replica", *DENSE_AXES)


class Coordinates(NamedTuple):
    """Where one rank stands on each axis of the mesh."""

    pp: int
    dp: int
    cp: int
    ep: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many ranks each axis has. `dp_shard` ranks of dp share one copy of the weights."""

    pp: int
    dp: int
    cp: int
    ep: int
    dp_shard: int | None = None

    @classmethod
    def of_world(
        cls, world_size: int, *, pp: int, cp: int, ep: int, dp_shard: int | None = None
    ) -> "Mesh":
        """The mesh of `world_size` ranks; dp is what is left. Raises RequestError if not whole."""
        model_ranks = pp * cp * ep
        dp, rest = divmod(world_size, model_ranks)
        if rest or dp < 1:
            nearest = tuple(str(model_ranks * n) for n in (dp, max(dp + 1, 1)) if n > 0)
            wanted = f"a multiple of pp * cp * ep = {model_ranks}"
            raise _refused(Fault("world_size", str(world_size), wanted, nearest))
        if dp_shard is not None and dp % dp_shard:
            below = max(d for d in range(1, min(dp, dp_shard) + 1) if dp % d == 0)
            wanted = f"a divisor of dp = {dp}"
            raise _refused(Fault("parallel.dp_shard", str(dp_shard), wanted, (str(below),)))
        return cls(pp, dp, cp, ep, dp_shard)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, ep = divmod(rank, self.ep)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, cp, ep)

    def rank(self, *, pp: int, dp: int = 0, cp: int = 0, ep: int = 0) -> int:
        """The rank that stands there, the inverse of `coordinates`."""
        place = Coordinates(pp, dp, cp, ep)
        sizes = (self.pp, self.dp, self.cp, self.ep)
        assert all(0 <= x < n for x, n in zip(place, sizes, strict=True)), f"{place} of {sizes}"
        return ((pp * self.dp + dp) * self.cp + cp) * self.ep + ep

    @property
    def num_data_ranks(self) -> int:
        """How many ranks of one stage read different samples: an ep rank is a data rank."""
        return self.dp * self.ep

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch `rank` reads; its pp and cp peers read the same."""
        _, dp, _, ep = self.coordinates(rank)
        return dp * self.ep + ep

    def sizes(self) -> dict[Axis, int]:
        """How many ranks each axis has, outermost first, with dp cut in replica and shard."""
        shard = self.dp if self.dp_shard is None else self.dp_shard
        return {
            "pp": self.pp,
            "replica": self.dp // shard,
            "shard": shard,
            "cp": self.cp,
            "ep": self.ep,
        }

    def partition(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All ranks in groups whose members differ on `axes` alone, each group in rank order."""
        sizes = self.sizes()
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*(range(size) for size in sizes.values()))):
            fixed = tuple(x for axis, x in zip(sizes, place, strict=True) if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The group of `partition` that `rank` is in."""
        return next(group for group in self.partition(*axes) if rank in group)


def _refused(fault: Fault) -> RequestError:
    return RequestError("mesh.invalid", what=str(fault), faults=(fault,))
