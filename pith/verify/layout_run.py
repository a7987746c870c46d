"""A few steps of a layout on real processes: what every rank finds goes to a file of its own."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch
from pith.engine.chunk import MicroBatch
from pith.engine.executor import Execution
from pith.engine.shard import Parameters
from pith.launch import devices
from pith.launch.devices import BackendChoice, DeviceChoice
from pith.launch.elastic import launch
from pith.run.job import Job
from pith.run.stop import StopRequest
from pith.train.build import build
from pith.train.step import StepResult, Trainer
from pith.verify.probe import Probe, wrap
from pith.verify.share import Share, share

TIMEOUT_S = 120.0  # of one collective
LOCAL = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What the optimizer of a rank steps with."""

    grads: Share
    lr: float


@dataclass(frozen=True, slots=True)
class RankSteps:
    """What one rank knows of each of its steps."""

    results: list[StepResult]
    grads: list[Share]  # as they were reduced
    given: list[HandedOver | None]  # None where the optimizer took no step
    weights: list[Share]  # after the step
    probe: Probe | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What every rank of a layout is to do."""

    batches: tuple[Batch, ...]  # one a step
    folder: str
    probed: int | None = None  # the step to probe


def run_layout(
    recipe: Recipe,
    batches: Sequence[Batch],
    *,
    num_ranks: int,
    device: DeviceChoice,
    probed: int | None = None,
) -> list[RankSteps]:
    """Take a step on each of the global `batches` on new processes; by rank.

    Raises what `launch` raises, UnavailableError where this machine has no such device.
    """
    shared = device == "cuda" and 0 < torch.cuda.device_count() < num_ranks
    asked: BackendChoice = "gloo" if shared else "auto"  # only gloo lets ranks share a GPU
    place, backend = devices.choose(device, backend=asked, num_ranks=num_ranks)
    with tempfile.TemporaryDirectory(prefix="pith-parity-") as folder:
        job = Job(
            recipe_toml=recipe.to_toml(),
            recipe_name=recipe.name,
            run_dir=folder,
            device=place,
            backend=backend,
            timeout_s=TIMEOUT_S,
            debug=True,
        )
        assignment = Assignment(tuple(batches), folder, probed)
        launch(partial(run_rank, assignment), job, num_ranks=num_ranks)
        found = [_path(folder, rank).read_bytes() for rank in range(num_ranks)]
    return [pickle.loads(content) for content in found]


def run_rank(assignment: Assignment, job: Job, stop: StopRequest) -> dict[str, Any]:
    """This rank's share of the steps, through the production code."""
    device = LOCAL if job.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    patience = timedelta(seconds=job.timeout_s)
    world = World.joined(device, backend=job.backend, timeout=patience)
    recipe = Recipe.parse(job.recipe_toml, world_size=world.size)
    with closing(Trainer(recipe, world, build(recipe, world, headers=True))) as trainer:
        found = take_steps(trainer, assignment.batches, probed=assignment.probed)
    _path(assignment.folder, world.rank).write_bytes(pickle.dumps(found))
    return {}


@contextmanager
def closing(trainer: Trainer) -> Iterator[Trainer]:
    """`trainer` for as long as it is needed; its groups are closed at the end."""
    yield trainer
    trainer.world.barrier()
    trainer.model.close()


def take_steps(
    trainer: Trainer, batches: Sequence[Batch], *, probed: int | None = None
) -> RankSteps:
    """A step on each of the global `batches`, of which this rank reads its rows."""
    parameters = trainer.model.parameters
    found = RankSteps([], [], [], [], None if probed is None else Probe(range(0)))
    kept = keep_gradients(parameters)
    with _watched_optimizer(trainer) as given:
        for index, batch in enumerate(batches):
            if index == probed and found.probe is not None:
                attach(found.probe, trainer)
            found.results.append(trainer.step(index, batch.take(trainer.rows)))
            found.grads.append(share(parameters, kept))
            found.given.append(given.pop() if given else None)
            found.weights.append(share(parameters, parameters.masters))
            if index == probed:
                break
    return found


def keep_gradients(parameters: Parameters) -> Mapping[str, Tensor]:
    """A mapping that will hold the gradients of the latest step, as they were reduced."""
    kept: dict[str, Tensor] = {}

    def keep(reduce: Callable[..., dict[str, Tensor]], *, scale: float) -> dict[str, Tensor]:
        grads = reduce(scale=scale)
        kept.update({name: grad.clone() for name, grad in grads.items()})
        return grads

    wrap(parameters, "reduce", keep)
    return kept


@contextmanager
def _watched_optimizer(trainer: Trainer) -> Iterator[list[HandedOver]]:
    """A list that gets what the optimizer steps with, each time."""
    parameters, optimizer = trainer.model.parameters, trainer.model.optimizer
    given: list[HandedOver] = []

    def note(*_: Any) -> None:
        masters = parameters.masters.items()
        grads = {name: master.grad for name, master in masters if master.grad is not None}
        rate = max(group["lr"] for group in optimizer.param_groups)
        given.append(HandedOver(share(parameters, grads), rate))

    handle = optimizer.register_step_pre_hook(note)
    yield given
    handle.remove()


def attach(probe: Probe, trainer: Trainer) -> None:
    """Probe the stages of this rank, and tell the probe which sequences pass."""
    for stage in trainer.model.stages.values():
        probe.attach(stage)
    first_row = trainer.rows.start

    def known(
        run: Callable[..., Execution], batches: Sequence[MicroBatch], **options: Any
    ) -> Execution:
        start = first_row
        for batch in batches:
            rows = range(start, start + len(batch.tokens_BS))
            probe.know(rows, batch.tokens_BS, batch.labels_BS, batch.context)
            start = rows.stop
        return run(batches, **options)

    wrap(trainer.model.training, "run", known)


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"steps-{rank}"
