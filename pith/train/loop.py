"""A training run, as one rank lives it: data, steps, validation, metrics, checkpoints."""

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pith.checkpoint.manifest import Manifest, Position, faults, read
from pith.checkpoint.saver import Saver, open_group
from pith.checkpoint.shelf import Shelf
from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch, Loader
from pith.engine.clock import Clock, clock_of
from pith.errors import RunFailedError, StoppedError
from pith.ops.cross_entropy import NOT_COUNTED
from pith.run.folder import RunFolder
from pith.run.job import Job
from pith.run.metrics import read_steps
from pith.run.progress import Progress
from pith.run.stop import StopRequest
from pith.run.trace import TraceFile
from pith.schedule.table import Kind
from pith.train.build import build
from pith.train.fault import FaultSite
from pith.train.log import Log
from pith.train.start import damaged, open_data, shelf_of
from pith.train.state import START, after, manifest_of, pieces, restore
from pith.train.step import StepResult, Trainer

Summary = dict[str, Any]


def run(job: Job, stop: StopRequest) -> Summary | None:
    """Train as `job` says, as the rank that the process group makes of this process.

    Returns the summary on rank 0, None elsewhere. Raises RequestError for a corpus or a checkpoint
    that does not serve, RunFailedError when the run goes wrong, StoppedError on every rank once
    `stop` was asked of any and a checkpoint is saved.
    """
    world = World.joined(
        _device(job), backend=job.backend, timeout=timedelta(seconds=job.timeout_s)
    )
    recipe = Recipe.parse(job.recipe_toml, world.size)
    if recipe.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(recipe.training.deterministic)
    world.agree("recipe", job.recipe_toml)
    group = open_group(world)
    manifest = _manifest(job, world)
    position = manifest.position if manifest is not None else START
    folder = folder_of(job)
    loader = open_data(recipe, work_dir=folder.path, verify=world.rank == 0, position=position)
    world.agree("corpus", loader.fingerprint)
    model = build(recipe, world, headers=job.debug, empty=manifest is not None)
    trainer = Trainer(recipe, world, model)
    here = _Whereabouts(job, trainer)
    with ExitStack() as stack:
        log = stack.enter_context(Log(folder.metrics, recipe, world))
        if manifest is not None:
            _load(trainer, manifest, folder=Path(job.checkpoint or ""), group=group, log=log)
        shelf = shelf_of(recipe, folder)
        saver = Saver(
            shelf,
            pieces(model),
            world=world,
            group=group,
            keep=recipe.checkpoint.keep,
            asynchronous=recipe.checkpoint.asynchronous,
            phase=here.begin_part_of_save,
        )
        stack.enter_context(saver)
        steps_left = recipe.training.steps - position.step
        stream = loader.stream(position.samples, steps_left, rows=trainer.rows)
        batches = stack.enter_context(stream)
        rank = _Rank(job, trainer, loader, log, shelf, saver, here, stop, position)
        rank.train(batches)
        return rank.finish()


def folder_of(job: Job) -> RunFolder:
    """The run folder that was made for `job`."""
    return RunFolder(path=Path(job.run_dir), id=job.run_id)


def _manifest(job: Job, world: World) -> Manifest | None:
    """What the checkpoint to resume from says, the same on every rank; None without one."""
    if job.checkpoint is None:
        return None
    manifest = read(Path(job.checkpoint))
    world.agree("checkpoint", manifest.model_dump_json())
    return manifest


def _load(
    trainer: Trainer, manifest: Manifest, *, folder: Path, group: dist.ProcessGroup, log: Log
) -> None:
    """Fill weights and optimizer from `folder`, whose files all ranks together verify first.

    Raises RequestError on every rank where a file is not what was saved.
    """
    start, world = time.perf_counter(), trainer.world
    names = [entry.name for entry in manifest.files][world.rank :: world.size]
    checksums = trainer.recipe.checkpoint.verify
    found = world.together(
        lambda: faults(folder, manifest, checksums=checksums, names=names), group=group
    )
    if any(found):
        raise damaged(folder, [fault for part in found for fault in part])
    world.together(lambda: restore(trainer.model, folder, manifest), group=group)
    seconds, step = time.perf_counter() - start, manifest.position.step
    log.event("loaded", f"{folder.name} loaded in {seconds:.2f} s", step=step, seconds=seconds)


@dataclass(slots=True)
class _Rank:
    """One rank between its first step and its last."""

    job: Job
    trainer: Trainer
    loader: Loader
    log: Log
    shelf: Shelf
    saver: Saver
    here: "_Whereabouts"
    stop: StopRequest
    position: Position  # after the last step that was taken

    @property
    def recipe(self) -> Recipe:
        return self.trainer.recipe

    @property
    def trace(self) -> TraceFile:
        world = self.trainer.world
        return TraceFile(folder_of(self.job).trace, rank=world.rank, num_ranks=world.size)

    def train(self, batches: Iterator[Batch]) -> None:
        """Take the steps that are left, saving as the recipe says and when asked to stop."""
        validation, checkpoint = self.recipe.validation, self.recipe.checkpoint
        first, steps = self.position.step, self.recipe.training.steps
        for index in range(first, steps):
            result = self._step(next(batches), number=index + 1 - first)
            is_last = index + 1 == steps
            if _is_due(index + 1, every=validation.every) and not (is_last or result.stop):
                self.validate()
            if is_last or result.stop or _is_due(index + 1, every=checkpoint.every):
                self._save()
            if result.stop:
                self._tell(self.saver.wait())
                raise self._stopped()

    def validate(self) -> float | None:
        """The mean loss over the validation sequences; None where none are held out."""
        self.here.begin_slot("validation")
        trainer, loader = self.trainer, self.loader
        num_sequences = min(self.recipe.validation.num_sequences, loader.num_validation_samples)
        if num_sequences == 0:
            return None
        total, num_counted = 0.0, 0
        for batch in batches_of(loader.validation(num_sequences), self.recipe):
            total += trainer.evaluate(batch.take(trainer.rows))
            num_counted += batch.num_counted
        loss = total / max(1, num_counted)
        text = f"validation loss {loss:.4f} over {num_sequences} sequences"
        self.log.event("validation", text, step=self.position.step, validation_loss=loss)
        return loss

    def finish(self) -> Summary | None:
        """Validate once more and say how it went: on rank 0, which leaves it in the run folder."""
        validation = self.validate()
        if validation is not None:
            _require_finite("validation loss", validation)
        self._tell(self.saver.wait())
        if self.trainer.world.rank != 0:
            return None
        _require_finite("loss of the last step", self.position.last_loss)
        summary = self._summary(validation)
        folder_of(self.job).finish(summary)
        return summary

    def _step(self, batch: Batch, *, number: int) -> StepResult:
        """Take the step that is this process's `number`-th, from 1."""
        clock = self._clock(number)
        index, start = self.position.step, time.perf_counter()
        self.here.begin(index + 1)
        if number == 1:
            _assert_same_data(self.trainer, batch)
        result = self.trainer.step(
            index,
            batch,
            watch=self.here.begin_slot,
            is_stop_wanted=lambda: self.stop.signal is not None,
            clock=clock,
        )
        _synchronise(self.trainer.world.device)
        first_sample = self.position.samples
        num_samples = self.recipe.training.global_batch_size
        self.position = after(self.position, result, num_samples=num_samples)
        self.log.step(
            self.position,
            result,
            seconds=time.perf_counter() - start,
            sample_ids=lambda: self.loader.sample_ids(first_sample),
        )
        if clock is not None:
            self.trace.append(self.position.step, clock=clock.name, spans=result.spans)
        self._tell(self.saver.check())
        self._report_unusual(result)
        return result

    def _clock(self, number: int) -> Clock | None:
        """What times the step of that number; None where it is not traced."""
        traced = self.recipe.log.trace_steps
        if number not in traced:
            return None
        if number == min(traced):
            self.trace.clear()
        return clock_of(self.trainer.world.device)

    def _report_unusual(self, result: StepResult) -> None:
        """Tell of a step without labels, or one that moved no weight; stop where asked to."""
        step, training = self.position.step, self.recipe.training
        if result.num_counted == 0:
            self.log.event("nothing_counted", f"step {step}: no label counts", step=step)
        if result.updated:
            return
        ranks = ", ".join(str(rank) for rank in result.faulty_ranks)
        culprit = "a gradient" if math.isfinite(result.loss) else f"loss {result.loss}"
        text = f"step {step}: {culprit} is not finite on rank {ranks}"
        self.log.event("non_finite", f"{text}; weights kept", step=step, ranks=result.faulty_ranks)
        if training.non_finite == "stop" or self.position.skips > training.max_skips:
            raise RunFailedError(
                "run.non-finite",
                what=text,
                found=f"{self.position.skips} such steps in a row",
                wanted="finite values",
                next_step="lower optimizer.lr, or --set training.non_finite=skip to pass over them",
            )

    def _save(self) -> None:
        """Save where the run stands; with `asynchronous` only the copy is waited for."""
        self.here.begin_slot("save")
        self.log.sync()
        start, step = time.perf_counter(), self.position.step
        manifest = manifest_of(
            self.position,
            job=self.job,
            recipe=self.recipe,
            mesh=self.trainer.model.mesh,
            loader=self.loader,
        )
        self._tell(self.saver.save(manifest))
        seconds = time.perf_counter() - start
        text = f"checkpoint {self._folder.name}: training stood still for {seconds:.2f} s"
        self.log.event(
            "checkpoint",
            text,
            step=step,
            checkpoint=str(self._folder),
            stall_seconds=seconds,
            asynchronous=self.recipe.checkpoint.asynchronous,
        )

    @property
    def _folder(self) -> Path:
        """The checkpoint of this position."""
        return self.shelf.folder(self.position.step)

    def _tell(self, notices: Sequence[str]) -> None:
        for notice in notices:
            self.log.event("checkpoint_notice", notice, step=self.position.step, notice=notice)

    def _stopped(self) -> StoppedError:
        noted = self.trainer.world.together(lambda: self.stop.signal)
        by = next(signal for signal in noted if signal is not None)
        return StoppedError(
            "run.stopped",
            what=f"stopped by {by.name} after step {self.position.step}, which is saved",
            where=str(self._folder),
            next_step="run the same command again",
        )

    def _summary(self, validation: float | None) -> Summary:
        recipe, model, position = self.recipe, self.trainer.model, self.position
        metrics = folder_of(self.job).metrics
        # A run that was resumed after its last step has taken none itself.
        speeds = self.log.speeds or [line["tokens_per_second"] for line in read_steps(metrics)]
        routing = self.trainer.routing
        mesh = model.mesh
        return {
            "recipe": self.job.recipe_name,
            "layout": {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep},
            "world_size": self.trainer.world.size,
            "schedule": model.table.name,
            "steps": position.step,
            "first_loss": position.first_loss,
            "last_loss": position.last_loss,
            "validation_loss": validation,
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "run_dir": self.job.run_dir,
            "checkpoint": str(self._folder),
            "operators": model.operators.names(),
            "exchange": recipe.exchange_name,
            "routing": routing.name if routing is not None else "learned",
        }


def _assert_same_data(trainer: Trainer, batch: Batch) -> None:
    """The ranks that work on the same samples read the same. Raises RunFailedError."""
    world = trainer.world
    peers = trainer.model.mesh.peers(world.rank, "pp", "cp")
    world.agree("data of the first step", batch.digest(), among=peers)


class _Whereabouts:
    """Where this rank is, written down for others to read; injected faults strike on the way."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._progress = Progress(job.progress_path(trainer.world.rank))
        self._site = FaultSite(job.fault, rank=trainer.world.rank)
        self._step = 0
        trainer.model.stopwatch.notice = self._begin_exchange

    def begin(self, step: int) -> None:
        """The step, counted from 1, begins with its data."""
        self._step = step
        self.begin_slot("data")

    def begin_slot(self, text: str) -> None:
        """A slot of the table, or a part of the step that has a name."""
        self._progress.set(self._step, text)
        names = {kind.value: "backward" for kind in Kind} | {Kind.F.value: "forward"}
        self._site.reach(names.get(text[0], text), self._step)

    def begin_part_of_save(self, name: str, step: int) -> None:
        """A part of saving what `step` left, perhaps while later steps are taken."""
        self._site.reach(name, step)

    def _begin_exchange(self, phase: str) -> None:
        self._site.reach(phase, self._step)


def _is_due(step: int, *, every: int) -> bool:
    return every > 0 and step % every == 0


def batches_of(sequences: Batch, recipe: Recipe) -> Iterator[Batch]:
    """Cut `sequences` into global batches, the last one filled up with rows that do not count."""
    size = recipe.training.global_batch_size
    for start in range(0, len(sequences.sample_ids), size):
        rows = np.arange(start, start + size)
        beyond = rows >= len(sequences.sample_ids)
        rows[beyond] = 0
        labels_NS = sequences.labels_NS[rows]
        labels_NS[beyond] = NOT_COUNTED
        yield Batch(sequences.tokens_NS[rows], labels_NS, sequences.sample_ids[rows])


def _require_finite(what: str, value: float | None) -> None:
    if value is None or not math.isfinite(value):
        raise RunFailedError(
            "run.non-finite",
            what=f"the {what} is {value}",
            wanted="a finite value",
            next_step="lower optimizer.lr",
        )


def _device(job: Job) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _synchronise(device: torch.device) -> None:
    """Let the step's last kernels count into its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
