"""A training run, as one rank lives it: data, steps, validation, metrics, final weights."""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pith.checkpoint.weights import begin, commit, save_part, temporary_folder
from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch, Loader, prepare
from pith.errors import RunFailedError
from pith.ops.cross_entropy import NOT_COUNTED
from pith.plan.flops import mfu, peak_bf16_flops
from pith.run.console import StepConsole
from pith.run.folder import RunFolder
from pith.run.job import Job
from pith.run.metrics import MetricsLog, StepMetrics
from pith.run.progress import Progress
from pith.run.trace import write_trace
from pith.schedule.table import Kind
from pith.train.build import build
from pith.train.fault import FaultSite
from pith.train.step import StepResult, Trainer
from pith.train.whole import whole_weights

Summary = dict[str, Any]


def run(job: Job) -> Summary | None:
    """Train as `job` says, as the rank that the process group makes of this process.

    Returns the summary on rank 0, None elsewhere. Raises RequestError for a corpus that does not
    serve, RunFailedError when the run goes wrong.
    """
    world = World.joined(
        _device(job), backend=job.backend, timeout=timedelta(seconds=job.timeout_s)
    )
    recipe = Recipe.parse(job.recipe_toml, world.size)
    if recipe.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(recipe.training.deterministic)
    if world.rank == 0:
        begin(_weights_folder(job, recipe)).rmdir()  # refused now, not after the last step
    world.agree("recipe", job.recipe_toml)
    loader = open_data(recipe, work_dir=Path(job.run_dir), verify=world.rank == 0)
    world.agree("corpus", loader.fingerprint)
    trainer = Trainer(recipe, world, build(recipe, world, headers=job.debug))
    with ExitStack() as stack:
        log = stack.enter_context(Log(job, recipe, world))
        stream = loader.stream(0, recipe.training.steps, rows=trainer.rows)
        batches = stack.enter_context(stream)
        here = _Whereabouts(job, trainer)
        _train(here, trainer, log, loader, iter(batches))
        validation = _validate(here, trainer, log, loader)
        return _finish(job, trainer, log, validation)


def open_data(recipe: Recipe, *, work_dir: Path, verify: bool) -> Loader:
    """The run's data, checked before the first step. Raises RequestError where it cannot serve.

    A text is tokenized under `work_dir`, once. `verify` reads a whole corpus against its checksums.
    """
    corpus = prepare(recipe.data.corpus, work_dir=work_dir / "corpus", verify=verify)
    corpus.check_vocabulary(recipe.architecture.vocab_size)
    loader = Loader(
        corpus,
        sequence_length=recipe.training.sequence_length,
        global_batch_size=recipe.training.global_batch_size,
        seed=recipe.data.seed,
        validation_fraction=recipe.data.validation,
        packing=recipe.data.packing,
        epochs=recipe.data.epochs,
    )
    loader.check(recipe.training.steps)
    return loader


class Log:
    """Everything that a run tells; only rank 0 speaks."""

    def __init__(self, job: Job, recipe: Recipe, world: World) -> None:
        self._recipe = recipe
        self._world = world
        self._speaks = world.rank == 0
        self._metrics = MetricsLog(folder_of(job).metrics) if self._speaks else None
        self._console = StepConsole(recipe.training.steps)
        self.steps: list[StepMetrics] = []
        length = recipe.training.sequence_length
        architecture = recipe.architecture
        self._flops = {
            "mfu_causal": architecture.flops_per_token(length, causal=True),
            "mfu_full": architecture.flops_per_token(length, causal=False),
        }

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def step(self, index: int, result: StepResult, seconds: float) -> None:
        """Write down one step."""
        tokens = self._recipe.batch(self._world.size).tokens_per_step
        metrics = StepMetrics(
            step=index + 1,
            loss=result.loss,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            memory_bytes=result.memory_bytes,
            communication_seconds=self._communication(result),
            expert_load={str(layer): row for layer, row in enumerate(result.load_LE) if any(row)},
            **self._utilisation(tokens / seconds),
        )
        self.steps.append(metrics)
        if self._metrics is not None:
            self._metrics.step(metrics)
            if index % self._recipe.log.every == 0 or index + 1 == self._recipe.training.steps:
                self._console.step(metrics)

    def event(self, name: str, text: str, **fields: object) -> None:
        """Write down something that happened between steps."""
        if self._metrics is not None:
            self._metrics.event(name, **fields)
            self._console.say(text)

    def _communication(self, result: StepResult) -> Mapping[str, float] | None:
        """What the host measured, which says nothing of collectives that run on the device."""
        return None if self._world.backend == "nccl" else result.communication_seconds

    def _utilisation(self, tokens_per_second: float) -> dict[str, float | None]:
        device = self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {
            key: mfu(
                tokens_per_second,
                flops_per_token=flops,
                peak_flops=peak_bf16_flops(name),
                num_devices=self._world.size,
            )
            for key, flops in self._flops.items()
        }


def _train(
    here: "_Whereabouts", trainer: Trainer, log: Log, loader: Loader, batches: Iterator[Batch]
) -> None:
    training = trainer.recipe.training
    every = trainer.recipe.validation.every
    num_skips = 0
    for index in range(training.steps):
        start = time.perf_counter()
        here.begin(index + 1)
        batch = next(batches)
        if index == 0:
            _assert_same_data(trainer, batch)
        result = trainer.step(index, batch, watch=here.begin_slot)
        _synchronise(trainer.world.device)
        log.step(index, result, time.perf_counter() - start)
        if index == 0:
            write_trace(here.trace, trainer.world.rank, [" ".join(result.slots)])
        if result.num_counted == 0:
            log.event("nothing_counted", f"step {index + 1}: no label counts", step=index + 1)
        num_skips = 0 if result.updated else num_skips + 1
        if not result.updated:
            _report_non_finite(log, index, result, num_skips, trainer.recipe)
        if every and (index + 1) % every == 0 and index + 1 < training.steps:
            _validate(here, trainer, log, loader)


class _Whereabouts:
    """Where this rank is, written down for others to read; injected faults strike on the way."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._progress = Progress(job.progress_path(trainer.world.rank))
        self._site = FaultSite(job.fault, rank=trainer.world.rank)
        self._step = 0
        self.trace = folder_of(job).trace
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

    def _begin_exchange(self, phase: str) -> None:
        self._site.reach(phase, self._step)


def _assert_same_data(trainer: Trainer, batch: Batch) -> None:
    """The ranks that work on the same samples read the same. Raises RunFailedError."""
    world = trainer.world
    peers = trainer.model.mesh.peers(world.rank, "pp", "cp")
    world.agree("data of the first step", batch.digest(), among=peers)


def _report_non_finite(
    log: Log, index: int, result: StepResult, num_skips: int, recipe: Recipe
) -> None:
    """Tell of a step that moved no weight; stop where the recipe says so."""
    ranks = ", ".join(str(rank) for rank in result.faulty_ranks)
    culprit = "a gradient" if math.isfinite(result.loss) else f"loss {result.loss}"
    text = f"step {index + 1}: {culprit} is not finite on rank {ranks}"
    log.event("non_finite", f"{text}; weights kept", step=index + 1, ranks=result.faulty_ranks)
    if recipe.training.non_finite == "stop" or num_skips > recipe.training.max_skips:
        raise RunFailedError(
            "run.non-finite",
            what=text,
            found=f"{num_skips} such steps in a row",
            wanted="finite values",
            next_step="lower optimizer.lr, or --set training.non_finite=skip to pass over them",
        )


def _validate(here: _Whereabouts, trainer: Trainer, log: Log, loader: Loader) -> float | None:
    """The mean loss over the validation sequences; None where none are held out."""
    here.begin_slot("validation")
    num_sequences = min(trainer.recipe.validation.num_sequences, loader.num_validation_samples)
    if num_sequences == 0:
        return None
    total, num_counted = 0.0, 0
    for batch in batches_of(loader.validation(num_sequences), trainer.recipe):
        total += trainer.evaluate(batch.take(trainer.rows))
        num_counted += batch.num_counted
    loss = total / max(1, num_counted)
    text = f"validation loss {loss:.4f} over {num_sequences} sequences"
    log.event("validation", text, step=len(log.steps), validation_loss=loss)
    return loss


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


def _finish(job: Job, trainer: Trainer, log: Log, validation: float | None) -> Summary | None:
    """Save the weights and say how it went."""
    world, recipe, model = trainer.world, trainer.recipe, trainer.model
    if validation is not None:
        _require_finite("validation loss", validation)
    folder = _weights_folder(job, recipe)
    if world.rank == 0:
        begin(folder)
    whole = whole_weights(model, world.rank)
    world.barrier()
    save_part(whole, temporary_folder(folder), part=world.rank)
    world.barrier()
    if world.rank != 0:
        return None
    metadata = {"recipe": job.recipe_name, "step": str(recipe.training.steps)}
    commit(temporary_folder(folder), folder, num_parts=world.size, metadata=metadata)
    mesh = model.mesh
    first, last = log.steps[0], log.steps[-1]
    _require_finite("loss of the last step", last.loss)
    return {
        "recipe": job.recipe_name,
        "layout": {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep},
        "world_size": world.size,
        "schedule": model.table.name,
        "steps": len(log.steps),
        "first_loss": first.loss,
        "last_loss": last.loss,
        "validation_loss": validation,
        "tokens_per_second": statistics.median(m.tokens_per_second for m in log.steps),
        "run_dir": job.run_dir,
        "checkpoint": str(folder),
        "operators": model.operators.names(),
        "exchange": recipe.exchange_name,
        "routing": trainer.routing.name if trainer.routing is not None else "learned",
    }


def _require_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise RunFailedError(
            "run.non-finite",
            what=f"the {what} is {value}",
            wanted="a finite value",
            next_step="lower optimizer.lr",
        )


def _weights_folder(job: Job, recipe: Recipe) -> Path:
    """Where the weights of the last step go."""
    directory = Path(recipe.checkpoint.directory or folder_of(job).checkpoints).absolute()
    return directory / f"weights-{recipe.training.steps:08d}"


def folder_of(job: Job) -> RunFolder:
    """The run folder that was made for `job`."""
    return RunFolder(Path(job.run_dir))


def _device(job: Job) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _synchronise(device: torch.device) -> None:
    """Let the step's last kernels count into its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
