"""Ranks and their coordinates: pp outermost, then dp, cp, and ep innermost."""

from dataclasses import dataclass
from typing import NamedTuple

from pith.errors import Fault, RequestError


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

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of the pipeline that `rank` belongs to, by pipeline position."""
        _, dp, cp, ep = self.coordinates(rank)
        return tuple(self.rank(pp=pp, dp=dp, cp=cp, ep=ep) for pp in range(self.pp))


def _refused(fault: Fault) -> RequestError:
    return RequestError("mesh.invalid", what=str(fault), faults=(fault,))
