"""The mesh: ranks and coordinates are one to one, with pp outermost and ep innermost."""

import pytest

from pith.errors import RequestError
from pith.plan.mesh import Mesh

MESHES = [Mesh(1, 1, 1, 1), Mesh(4, 1, 1, 1), Mesh(2, 3, 1, 4), Mesh(3, 2, 2, 2), Mesh(1, 5, 2, 1)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_and_coordinates_are_one_to_one(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    assert [mesh.rank(**place._asdict()) for place in places] == list(range(mesh.world_size))
    assert places == sorted(places)


def test_ep_is_innermost_and_pp_outermost():
    mesh = Mesh(pp=2, dp=3, cp=1, ep=4)
    assert mesh.coordinates(1) == (0, 0, 0, 1)
    assert mesh.coordinates(4) == (0, 1, 0, 0)
    assert mesh.coordinates(12) == (1, 0, 0, 0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pipelines_partition_the_ranks(mesh):
    pipelines = {mesh.pipeline_ranks(rank) for rank in range(mesh.world_size)}
    assert sorted(rank for ranks in pipelines for rank in ranks) == list(range(mesh.world_size))
    for ranks in pipelines:
        assert [mesh.coordinates(rank).pp for rank in ranks] == list(range(mesh.pp))


@pytest.mark.parametrize("rank", [-1, 24])
def test_a_rank_outside_the_mesh_is_a_mistake_of_the_caller(rank):
    with pytest.raises(AssertionError):
        Mesh(2, 3, 1, 4).coordinates(rank)


def test_dp_is_what_is_left_of_the_world():
    assert Mesh.of_world(24, pp=2, cp=1, ep=4) == Mesh(2, 3, 1, 4)
    assert Mesh.of_world(16, pp=2, cp=1, ep=2, dp_shard=2).dp_shard == 2


@pytest.mark.parametrize("world_size", [-8, 0, 1, 7, 9, 23])
def test_a_world_that_is_not_whole_is_refused(world_size):
    with pytest.raises(RequestError) as caught:
        Mesh.of_world(world_size, pp=2, cp=1, ep=4)
    nearest = [int(value) for value in caught.value.faults[0].nearest]
    assert nearest
    for value in nearest:
        assert Mesh.of_world(value, pp=2, cp=1, ep=4).world_size == value


@pytest.mark.parametrize("dp_shard", [3, 5, 8])
def test_shards_must_divide_dp(dp_shard):
    with pytest.raises(RequestError, match="dp_shard"):
        Mesh.of_world(4, pp=1, cp=1, ep=1, dp_shard=dp_shard)
