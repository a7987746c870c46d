"""What the ranks of a world sum up and agree on."""

import pytest
import torch

from pith.comm.world import World
from pith.errors import RunFailedError

CPU = torch.device("cpu")


def all_that_ranks_do() -> dict[str, object]:
    world = World.joined(CPU)
    mine = torch.tensor([1.5, 10.0**world.rank, 2.0**-40], dtype=torch.float64)
    found: dict[str, object] = {
        "place": (world.rank, world.size),
        "sum": world.sum(mine).tolist(),
        "given": mine.tolist(),
        "large": world.sum(torch.tensor([2**52 + world.rank])).tolist(),
    }
    for odd in range(world.size):
        try:
            world.agree("recipe", "other" if world.rank == odd else "one")
            found[f"odd {odd}"] = "agreed"
        except RunFailedError as error:
            found[f"odd {odd}"] = error
    world.agree("recipe", "one" * 1000)
    for odd in range(world.size):
        text = "own" if world.rank == 0 else "shared"
        if world.rank == odd:
            text = "other"
        try:
            world.agree("rows", text, among=(0,) if world.rank == 0 else (1, 2))
            found[f"odd {odd} of its peers"] = "agreed"
        except RunFailedError as error:
            found[f"odd {odd} of its peers"] = error
    world.barrier()
    return found


def test_three_ranks_sum_exactly_and_stop_where_one_differs(run_ranks):
    outcomes = run_ranks(3, all_that_ranks_do)
    for rank, found in enumerate(outcomes):
        assert found["place"] == (rank, 3)
        assert found["sum"] == [4.5, 111.0, 3 * 2.0**-40]
        assert found["given"] == [1.5, 10.0**rank, 2.0**-40], "the argument stays as it was"
        assert found["large"] == [3 * 2**52 + 3]
        for odd, named in enumerate(("[1, 2]", "[1]", "[2]")):
            error = found[f"odd {odd}"]
            assert isinstance(error, RunFailedError), f"rank {rank} missed that {odd} differs"
            assert "recipe" in str(error)
            assert f"ranks {named} differ from rank 0" in str(error)


def test_only_ranks_that_must_be_the_same_are_compared_and_the_others_hear_nothing(run_ranks):
    alone, *pair = run_ranks(3, all_that_ranks_do)
    for found in (alone, *pair):
        assert found["odd 0 of its peers"] == "agreed", "rank 0 is compared with nobody"
    for odd in (1, 2):
        assert alone[f"odd {odd} of its peers"] == "agreed"
        for found in pair:
            error = found[f"odd {odd} of its peers"]
            assert isinstance(error, RunFailedError)
            assert error.code == "ranks.disagree"
            assert "different values of the rows" in str(error)
            assert "ranks [2] differ from rank 1" in str(error)
            assert "the same on ranks [1, 2]" in str(error)


def test_a_world_of_one_agrees_with_itself_without_a_process_group():
    world = World.joined(CPU)
    assert (world.rank, world.size) == (0, 1)
    world.agree("recipe", "anything")
    world.barrier()
    assert world.sum(torch.tensor([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("device", "backend", "staged"),
    [("cpu", "gloo", False), ("cuda", "gloo", True), ("cuda", "nccl", False)],
)
def test_messages_pass_through_the_host_only_where_gloo_cannot_send(device, backend, staged):
    assert World(0, 2, torch.device(device), backend).staged is staged
