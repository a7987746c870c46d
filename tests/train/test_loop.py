"""Ranks that work on the same samples and read different ones are stopped at the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pith.comm.world import World
from pith.data.loader import Batch
from pith.errors import RunFailedError
from pith.run.job import Job
from pith.run.stop import StopRequest
from pith.train import loop
from tests.train.parity import random_batch, recipe, trainer_of

CASES = ("a token", "a label", "the order")


def spoilt(batch: Batch, case: str) -> Batch:
    tokens_NS, labels_NS = batch.tokens_NS.copy(), batch.labels_NS.copy()
    if case == "a token":
        tokens_NS[-1, -1] += 1
    elif case == "a label":
        labels_NS[-1, -1] += 1
    else:
        tokens_NS, labels_NS = tokens_NS[::-1], labels_NS[::-1]
    return Batch(tokens_NS, labels_NS, batch.sample_ids)


def compared(layout: dict[str, Any], victim: int) -> dict[str, RunFailedError | str]:
    """What this rank hears where all is well, and where `victim` alone reads something else."""
    found: dict[str, RunFailedError | str] = {}
    with trainer_of(recipe(schedule="dualpipev", micro_batches=4, **layout)) as trainer:
        batch = random_batch(16).take(trainer.rows)
        for case in ("well", *CASES):
            own = spoilt(batch, case) if case != "well" and trainer.world.rank == victim else batch
            try:
                loop._assert_same_data(trainer, own)
                found[case] = batch.digest()
            except RunFailedError as error:
                found[case] = error
    return found


@pytest.mark.parametrize("layout", [{"pp": 2, "ep": 2}, {"pp": 2, "dp": 2}], ids=["ep", "dp"])
def test_pipelines_read_rows_of_their_own_and_only_one_whose_ranks_differ_is_stopped(
    run_ranks: Any, layout: dict[str, Any]
) -> None:
    outcomes = run_ranks(4, compared, layout, 3)
    well = [outcome["well"] for outcome in outcomes]
    assert well == [well[0], well[1]] * 2
    assert well[0] != well[1], "the two pipelines should read different rows"
    for case in CASES:
        for rank in (0, 2):
            assert outcomes[rank][case] == well[rank], f"rank {rank} is not of that pipeline"
        for rank in (1, 3):
            error = outcomes[rank][case]
            assert isinstance(error, RunFailedError), f"{case} is missed on rank {rank}"
            assert error.code == "ranks.disagree"
            assert "data of the first step" in str(error)
            assert "ranks [3] differ from rank 1" in str(error)


def train_with_another_order_on(rank: int, job: Job) -> RunFailedError | None:
    """The whole run, with a corpus that is the same everywhere and read in another order."""
    open_data = loop.open_data

    def open_mine(resolved: Any, **how: Any) -> Any:
        if World.joined(torch.device("cpu")).rank == rank:
            data = resolved.data.model_copy(update={"seed": 1})
            resolved = resolved.model_copy(update={"data": data})
        return open_data(resolved, **how)

    loop.open_data = open_mine
    try:
        loop.run(job, StopRequest())
    except RunFailedError as error:
        return error
    return None


@pytest.mark.parametrize("odd", [1, None])
def test_a_run_whose_pipeline_reads_different_data_ends_before_its_first_step(
    run_ranks: Any, command: Any, tmp_path: Path, odd: int | None
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = Job(command.recipe({"training.steps": 1}).to_toml(), "micro", str(run_dir), run_id="one")
    errors = run_ranks(2, train_with_another_order_on, odd, job)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    if odd is None:
        assert errors == [None, None]
        assert lines
    else:
        assert [error.code for error in errors] == ["ranks.disagree"] * 2
        assert all("ranks [1] differ from rank 0" in str(error) for error in errors)
        assert lines == []
