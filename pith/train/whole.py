"""The whole weights, put together from the shards of the ranks that hold them."""

from torch import Tensor

from pith.arch.parameter import Role
from pith.engine.shard import join_rows
from pith.plan.mesh import DATA_AXES
from pith.train.build import Model


def whole_weights(model: Model, rank: int) -> dict[str, Tensor]:
    """Master weights by canonical name on the host, each whole on one rank of the world.

    The first rank of each pipeline stage gets its parameters; the others get none. Every rank
    calls this.
    """
    specs = {spec.name: spec for spec in model.architecture.parameters()}
    first_copy = model.mesh.peers(rank, *DATA_AXES)[0]
    whole = {}
    for name in sorted(model.parameters.counted):
        tensor, spec = model.parameters.whole(name), specs[name]
        if spec.role is Role.EXPERTS and model.mesh.ep > 1:
            tensor = join_rows(tensor, spec.shape[0], group=model.groups.along("ep"))
        if rank == first_copy:
            whole[name] = tensor.cpu()
    return whole
