"""Groups of the mesh: opened once for the same ranks, and none in the middle of a step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pith.comm.groups import Groups, summing
from pith.comm.world import World
from pith.plan.mesh import Mesh


def opened() -> dict[str, Any]:
    groups = Groups(Mesh(2, 1, 1, 2), World.joined(torch.device("cpu")))
    ep, shard = groups.along("ep"), groups.along("shard", "cp", "ep")
    pair = groups.pair_up(0, 1)
    channels = groups.channels([(0, 1), (1, 0)])
    groups.seal()
    found = {
        "ep": dist.get_process_group_ranks(ep),
        "shared": ep is shard and groups.along("ep") is ep,
        "pair": dist.get_process_group_ranks(pair),
        "channels": {key: dist.get_process_group_ranks(g) for key, g in channels.items()},
        "sum": summing(ep)(torch.tensor([1, dist.get_rank()])).tolist(),
    }
    with pytest.raises(AssertionError, match="opened before"):
        groups.along("pp")
    groups.close()
    return found


def test_groups_hold_the_ranks_of_their_axes_and_are_shared_where_these_are_the_same(
    run_ranks: Any,
) -> None:
    for rank, found in enumerate(run_ranks(4, opened)):
        place, pipeline = divmod(rank, 2)
        assert found["ep"] == [2 * place, 2 * place + 1]
        assert found["shared"]
        assert found["pair"] == [pipeline, pipeline + 2]
        both = [pipeline, pipeline + 2]
        assert found["channels"] == {(0, 1): both, (1, 0): both}
        assert found["sum"] == [2, 4 * place + 1]
