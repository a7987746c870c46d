"""The mesh: ranks and coordinates are one to one, with pp outermost and ep innermost."""

from itertools import chain, combinations
from math import prod

import pytest

from pith.errors import RequestError
from pith.plan.mesh import Mesh

MESHES = [
    *(Mesh(1, 1, 1, 1), Mesh(4, 1, 1, 1), Mesh(2, 3, 1, 4), Mesh(3, 2, 2, 2), Mesh(1, 5, 2, 1)),
    *(Mesh(2, 4, 1, 2, dp_shard=2), Mesh(1, 6, 2, 2, dp_shard=3), Mesh(1, 4, 1, 3, dp_shard=1)),
]
AXES = ("pp", "replica", "shard", "cp", "ep")
CHOICES = list(chain.from_iterable(combinations(AXES, n) for n in range(len(AXES) + 1)))


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


def place(mesh, rank):
    """Where `rank` stands on each of AXES: neighbours in dp share one copy of the weights."""
    pp, dp, cp, ep = mesh.coordinates(rank)
    replica, shard = divmod(dp, mesh.dp_shard or mesh.dp)
    return dict(zip(AXES, (pp, replica, shard, cp, ep), strict=True))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_axes_partition_the_ranks_into_groups_that_differ_on_them_alone(mesh):
    sizes = mesh.sizes()
    assert tuple(sizes) == AXES
    assert prod(sizes.values()) == mesh.world_size
    assert sizes["replica"] * sizes["shard"] == mesh.dp
    for axes in CHOICES:
        groups = mesh.partition(*axes)
        assert sorted(chain(*groups)) == list(range(mesh.world_size)), axes
        assert list(groups) == sorted(groups), axes
        for group in groups:
            assert list(group) == sorted(group), axes
            assert len(group) == prod(sizes[axis] for axis in axes), axes
            places = [place(mesh, rank) for rank in group]
            for axis in AXES:
                found = {there[axis] for there in places}
                assert len(found) == (sizes[axis] if axis in axes else 1), (axes, axis)
            assert all(mesh.peers(rank, *axes) == group for rank in group), axes


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_order_in_which_axes_are_named_means_nothing(mesh):
    for axes in CHOICES:
        assert mesh.partition(*reversed(axes)) == mesh.partition(*axes)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pipelines_partition_the_ranks_in_the_order_of_their_stages(mesh):
    for ranks in mesh.partition("pp"):
        assert [mesh.coordinates(rank).pp for rank in ranks] == list(range(mesh.pp))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_data_ranks_share_out_the_batch_and_pipeline_and_context_peers_read_the_same(mesh):
    assert mesh.num_data_ranks == mesh.dp * mesh.ep
    for stage in mesh.partition("replica", "shard", "ep"):
        assert [mesh.data_rank(rank) for rank in stage] == list(range(mesh.num_data_ranks))
    for peers in mesh.partition("pp", "cp"):
        assert len({mesh.data_rank(rank) for rank in peers}) == 1


def test_dense_weights_are_sharded_over_expert_ranks_too_and_experts_are_not():
    mesh = Mesh(pp=2, dp=2, cp=1, ep=2)
    assert mesh.sizes() == {"pp": 2, "replica": 1, "shard": 2, "cp": 1, "ep": 2}
    assert mesh.partition("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.partition("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.partition("shard", "cp", "ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.partition("shard", "cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.partition("replica") == tuple((rank,) for rank in range(8))
    assert mesh.peers(6, "shard", "cp") == (4, 6)


def test_context_ranks_share_out_weights_as_well():
    mesh = Mesh(pp=1, dp=2, cp=2, ep=2)
    assert mesh.peers(0, "shard", "cp", "ep") == tuple(range(8))
    assert mesh.partition("shard", "cp") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_copies_of_the_weights_stand_apart_and_neighbours_share_one():
    mesh = Mesh(pp=1, dp=4, cp=1, ep=2, dp_shard=2)
    assert mesh.sizes() == {"pp": 1, "replica": 2, "shard": 2, "cp": 1, "ep": 2}
    assert mesh.partition("shard", "cp", "ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.partition("shard", "cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.partition("replica") == ((0, 4), (1, 5), (2, 6), (3, 7))
    alone = Mesh(pp=1, dp=2, cp=1, ep=1, dp_shard=1)
    assert alone.partition("shard", "cp", "ep") == ((0,), (1,))
    assert alone.partition("replica") == ((0, 1),)


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
