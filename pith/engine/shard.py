"""Parameters across a step: sharded by FSDP2, gathered once, reduced once.

The engine sees four calls: `gather` before the first slot, `main_grad` during the step (through
the gradient sink), `reduce` after the last slot, `release` at the end.

FSDP gives sharded storage and mixed precision. The modules that it shards are never called, so
its hooks never fire: gradients collect in main gradients of our own and are summed here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from pith.comm.groups import Groups
from pith.comm.renamed import reduce_scatter_rows
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Stage
from pith.plan.mesh import Axis

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Spread:
    """How one kind of parameter is spread: sharded over `shard`, copied over `replica`."""

    shard: dist.ProcessGroup
    replica: dist.ProcessGroup | None  # None: there is one copy
    mesh: DeviceMesh  # [shard], or [replica, shard]

    @classmethod
    def over(cls, groups: Groups, *axes: Axis) -> "Spread":
        """Sharded over `axes` and copied over the replica axis; every rank calls it."""
        mesh, device = groups.mesh, groups.world.device.type
        shard = groups.along(*axes)
        if mesh.sizes()["replica"] == 1:
            return cls(shard, None, DeviceMesh.from_group(shard, device))
        replica = groups.along("replica")
        copies = [mesh.peers(peer, *axes) for peer in mesh.peers(groups.world.rank, "replica")]
        names = ("replica", "shard")
        ranks = torch.tensor(copies)
        both = DeviceMesh.from_group([replica, shard], device, ranks, mesh_dim_names=names)
        return cls(shard, replica, both)

    @property
    def is_first_copy(self) -> bool:
        return self.replica is None or self.replica.rank() == 0

    def rows(self, num_rows: int) -> range:
        """This rank's share of `num_rows`: cut as torch.chunk does, so the last may be empty."""
        each = -(-num_rows // self.shard.size())
        start = min(num_rows, self.shard.rank() * each)
        return range(start, min(num_rows, start + each))


@dataclass(frozen=True, slots=True)
class Tied:
    """The embedding and the head are one weight, which goes by the embedding's name.

    `first` and `last` are the stages that hold them, None on other ranks. Where two ranks hold
    them, `group` joins the two.
    """

    first: Stage | None
    last: Stage | None
    group: dist.ProcessGroup | None

    @property
    def is_together(self) -> bool:
        """Whether this rank holds both."""
        return self.first is not None and self.last is not None

    @property
    def is_borrowed(self) -> bool:
        """Whether this rank holds the head's copy, and another the embedding."""
        return self.first is None and self.last is not None


class Parameters:
    """One rank's shards of its parameters, and the whole ones that modules hold in a step.

    The stages come on the meta device, in the dtype of the masters; they leave it uninitialised,
    to be filled through `masters`. Every rank of a shard or replica group makes the same calls.

    masters: canonical name -> this rank's rows of the first axis, a plain tensor of float32 or
        wider that shares FSDP's storage; may be empty. The optimizer steps on these.
    first_rows: canonical name -> where those rows start in the whole tensor, for experts in the
        stack of all of them.
    counted: the names that this rank counts in the gradient norm and saves.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        *,
        dense: Spread,
        experts: Spread,
        first_expert: int,
        compute_dtype: torch.dtype,
        device: torch.device,
        weights: WeightGrads,
        tied: Tied | None,
    ) -> None:
        self._weights, self._tied = weights, tied
        if tied is not None and tied.first is not None and tied.last is not None:
            tied.last.tie_to(nn.Parameter(torch.empty(0, dtype=compute_dtype, device=device)))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
        self._units = [
            unit
            for stage in stages.values()
            for unit in _shard(stage, dense, experts, first_expert, policy=policy, tied=tied)
        ]
        for stage in stages.values():
            cast(nn.Module, stage).to_empty(device=device)
        self._gathered: dict[str, nn.Parameter] = {}
        for unit in self._units:
            unit.module.unshard()  # the first time, FSDP settles where its shards are stored
            self._gathered |= unit.held()
            unit.module.reshard()
        self._unit_of = {name: unit for unit in self._units for name in unit.names}
        self._sharded = {
            name: held
            for unit in self._units
            for name, held in unit.held()
            if isinstance(held, DTensor)  # a tied head beside its embedding has no shard
        }
        self.masters = {name: _local(sharded) for name, sharded in self._sharded.items()}
        self.first_rows = {
            name: self._unit_of[name].first_row_of(sharded)
            for name, sharded in self._sharded.items()
        }
        first_copies = {n for n in self.masters if self._unit_of[n].spread.is_first_copy}
        borrowed = {EMBEDDING} if tied is not None and tied.is_borrowed else set()
        self.counted = frozenset(first_copies - borrowed)

    def gather(self) -> None:
        """Let modules hold whole weights, equal to the masters now; empty the main gradients."""
        self._weights.zero()
        for unit in self._units:
            unit.module.reshard()  # where gathered weights are left over, they may be stale
            for name, parameter in unit.held():
                assert self._is_in_place(name, parameter), f"{name} is stored elsewhere"
        for unit in self._units:
            unit.module.unshard()
            for name, parameter in unit.held():
                assert parameter is self._gathered[name], f"{name} is another object"
        if self._tied is not None and self._tied.is_together:
            self._gathered[HEAD].data = self._gathered[EMBEDDING].detach()

    def reduce(self, *, scale: float) -> dict[str, Tensor]:
        """This rank's shards of the finished gradients, set on the masters.

        They are summed over the ranks that share the parameter, and multiplied by `scale`.
        """
        grads: dict[str, Tensor] = {}
        for unit in self._units:
            mains = {name: self._weights.main_grad(self._gathered[name]) for name in unit.names}
            grads |= _sum_shards(mains, unit.spread)
        self._sum_tied(grads)
        if grads:  # a rank may hold empty stages only
            torch._foreach_mul_(list(grads.values()), scale)
        for name, grad in grads.items():
            self.masters[name].grad = grad
        return grads

    def are_gradients_finite(self) -> bool:
        """Whether this rank's main gradients are finite: its own, before they are summed."""
        mains = (self._weights.main_grad(held) for held in self._gathered.values())
        return all(bool(main.isfinite().all()) for main in mains)

    def release(self) -> None:
        """Let go of whole weights and of gradients."""
        for unit in self._units:
            unit.module.reshard()
        for master in self.masters.values():
            master.grad = None

    def _is_in_place(self, name: str, parameter: Tensor) -> bool:
        """Whether FSDP still stores this shard where its master lies."""
        if name not in self.masters:  # a tied head beside its embedding
            return parameter is self._gathered[name]
        if parameter is not self._sharded[name]:
            return False
        stored = _local(self._sharded[name]).untyped_storage()
        return stored.data_ptr() == self.masters[name].untyped_storage().data_ptr()

    def _sum_tied(self, grads: dict[str, Tensor]) -> None:
        """Add the gradients of embedding and head.

        Shards are added, not main gradients: a sum of two is equal on both ranks to the last bit,
        whatever the order in which a reduction over more ranks adds.
        """
        if self._tied is None:
            return
        if self._tied.group is not None:
            dist.all_reduce(grads[EMBEDDING], group=self._tied.group)
        elif self._tied.is_together:
            grads[EMBEDDING].add_(grads.pop(HEAD))


@dataclass(frozen=True, slots=True)
class _Unit:
    """What FSDP gathers in one collective: the parameters of `module`, less those of units in it.

    A tied head beside its embedding is in `names` for its gradient; FSDP does not know it.
    """

    module: FSDPModule
    stage: Stage
    spread: Spread
    first_row: int  # of the stage's stacked experts; 0 for others
    names: Mapping[str, str]  # canonical name -> name in the stage

    def held(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the modules hold now, by canonical name: shards, or whole weights."""
        for name, own in self.names.items():
            yield name, self.stage.get_parameter(own)

    def first_row_of(self, tensor: Tensor) -> int:
        """Where this rank's rows of the whole `tensor` start in the canonical one."""
        return self.first_row + self.spread.rows(len(tensor)).start


def _shard(
    stage: Stage,
    dense: Spread,
    experts: Spread,
    first_expert: int,
    *,
    policy: MixedPrecisionPolicy,
    tied: Tied | None,
) -> Iterator[_Unit]:
    """Hand the parameters of `stage` to FSDP, inner modules first."""
    owners = [(module, experts, first_expert) for module in stage.expert_modules()]
    owners += [(layer, dense, 0) for layer in stage.layers.values()]
    owners.append((cast(nn.Module, stage), dense, 0))
    names = {parameter: name for name, parameter in stage.named_parameters()}
    shared = tied is not None and tied.is_together and tied.last is stage
    ignored = {stage.get_parameter(HEAD)} if shared else set()
    borrowed = tied is not None and tied.is_borrowed
    for module, spread, first_row in owners:
        mine = [names.pop(parameter) for parameter in module.parameters() if parameter in names]
        if mine:
            canonical = {EMBEDDING if borrowed and own == HEAD else own: own for own in mine}
            fully_shard(module, mesh=spread.mesh, mp_policy=policy, ignored_params=ignored)
            yield _Unit(cast(FSDPModule, module), stage, spread, first_row, canonical)


def _local(parameter: DTensor) -> Tensor:
    """The plain tensor that holds this rank's rows."""
    with torch.no_grad():
        return parameter.to_local().detach()


def _sum_shards(mains: Mapping[str, Tensor], spread: Spread) -> dict[str, Tensor]:
    """Main gradients -> this rank's rows of their sums over all ranks of `spread`.

    One reduce-scatter, and one all-reduce where there are copies: latency is what they cost.
    """
    size = spread.shard.size()
    if size == 1 and spread.replica is None:
        return dict(mains)
    by_rank = [_cut_for_ranks(main, size) for main in mains.values()]
    packed = torch.cat(by_rank, dim=1)
    summed = packed[0]
    if size > 1:
        summed = torch.empty_like(summed)
        reduce_scatter_rows(summed, packed.flatten(), group=spread.shard)
    if spread.replica is not None:
        dist.all_reduce(summed, group=spread.replica)
    pieces = torch.split(summed, [cut.shape[1] for cut in by_rank])
    return {
        name: _rows(piece, len(spread.rows(len(main))), like=main)
        for piece, (name, main) in zip(pieces, mains.items(), strict=True)
    }


def _cut_for_ranks(main: Tensor, size: int) -> Tensor:
    """[rows, ...] -> [size, elements]: one equal share of the rows per rank, padded by zeros."""
    missing = -len(main) % size
    if missing:
        main = pad(main.view(len(main), -1), (0, 0, 0, missing))
    return main.view(size, -1)


def _rows(piece: Tensor, num_rows: int, *, like: Tensor) -> Tensor:
    """The first `num_rows` rows in a flat, padded `piece`."""
    shape = (num_rows, *like.shape[1:])
    return piece[: torch.Size(shape).numel()].view(shape)
