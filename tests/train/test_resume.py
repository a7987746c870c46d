"""2N steps equal N, a resume and N more, to the last bit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pith.comm.world import World
from pith.config import Recipe
from pith.run.job import Job
from pith.run.stop import StopRequest
from pith.train import loop
from pith.train.start import Resume, begun

STEPS = 8
# Warm-up over steps 1 to 3, the peak, then three steps of decay.
WSD = {
    "optimizer.schedule": "wsd",
    "optimizer.warmup_steps": 3,
    "optimizer.decay_steps": 3,
    "training.steps": STEPS,
    "checkpoint.every": 1,
    "checkpoint.keep": 0,
    "balance.z_loss": 0.001,
}
# Processes, what is set, and after which steps a run is resumed.
LAYOUTS = {
    "pp 2 x ep 2": (4, {"parallel.pp": 2, "parallel.ep": 2}, (1, 3, 6)),
    "dp 2": (2, {"parallel.pp": 1}, range(1, STEPS)),
}
COMPARED = ("loss", "grad_norm", "lr", "balance_loss", "z_loss", "sample_digest", "samples")


def live(recipe: Recipe, place: Path, resume: Resume) -> None:
    """A whole life of a rank: rank 0 finds out where the run starts, and all ranks train."""
    recipe = Recipe.parse(recipe.to_toml(), dist.get_world_size())
    world = World.joined(torch.device("cpu"), timeout=timedelta(seconds=60))
    jobs: list[Job | None] = [None]
    if world.rank == 0:
        start = begun(recipe, place, resume=resume)
        with start as begin:  # the lock is not needed after this test's only owner has it
            job = Job(recipe.to_toml(), recipe.name, str(begin.folder.path), timeout_s=60)
            checkpoint = str(begin.checkpoint) if begin.checkpoint else None
            jobs = [replace(job, run_id=begin.folder.id, checkpoint=checkpoint, debug=True)]
    dist.broadcast_object_list(jobs)
    assert jobs[0] is not None
    loop.run(jobs[0], StopRequest())


def live_often(recipe: Recipe, base: Path, after: Sequence[int]) -> None:
    """An unbroken run, then one from each of these checkpoints, with asynchronous saves."""
    live(recipe, base / "whole", "auto")
    later = recipe.checkpoint.model_copy(update={"asynchronous": True})
    again = recipe.model_copy(update={"checkpoint": later})
    for step in after:
        checkpoint = base / "whole" / "checkpoints" / f"step-{step:08d}"
        live(again, base / f"from-{step}", checkpoint)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def exact(line: dict[str, Any]) -> dict[str, Any]:
    """What must not differ, floats as hex."""
    values = {key: line[key] for key in ("step", *COMPARED)}
    return {key: v.hex() if isinstance(v, float) else v for key, v in values.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_after_any_step_of_the_schedule_goes_on_to_the_last_bit(
    run_ranks: Any, command: Any, tmp_path: Path, layout: str
) -> None:
    num_ranks, settings, after = LAYOUTS[layout]
    recipe = command.recipe({**WSD, **settings})
    run_ranks(num_ranks, live_often, recipe, tmp_path, after)
    whole = [exact(line) for line in steps(tmp_path / "whole")]
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert len({line["lr"] for line in whole}) >= 6, "the rate should have several phases"
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    for step in after:
        run_dir = tmp_path / f"from-{step}"
        assert [exact(line) for line in steps(run_dir)] == whole[step:], f"from step {step}"
        again = json.loads((run_dir / "report.json").read_text())
        for key in ("first_loss", "last_loss", "validation_loss", "steps"):
            assert again[key] == report[key], (step, key)
