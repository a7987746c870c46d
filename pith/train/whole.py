"""The whole weights, put together from the shards of the ranks that hold them."""

import torch.distributed as dist
from torch import Tensor

from pith.arch.parameter import Role
from pith.comm.renamed import all_gather_rows
from pith.train.build import DATA_AXES, Model


def whole_weights(model: Model, rank: int) -> dict[str, Tensor]:
    """Master weights by canonical name on the host, each whole on one rank of the world.

    The first rank of each pipeline stage gets its parameters; the others get none. Every rank
    calls this.
    """
    roles = {spec.name: spec.role for spec in model.architecture.parameters()}
    first_copy = model.mesh.peers(rank, *DATA_AXES)[0]
    whole = {}
    for name in sorted(model.parameters.counted):
        tensor = model.parameters.whole(name)
        if roles[name] is Role.EXPERTS and model.mesh.ep > 1:
            tensor = _joined(tensor, model.groups.along("ep"))
        if rank == first_copy:
            whole[name] = tensor.cpu()
    return whole


def _joined(experts_eFD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The stacks of all ranks of `group`, one after another: [e, F, D] -> [E, F, D]."""
    num_local, *rest = experts_eFD.shape
    all_EFD = experts_eFD.new_empty(group.size() * num_local, *rest)
    all_gather_rows(all_EFD, experts_eFD.contiguous(), group=group)
    return all_EFD
