"""`pith train`: from a recipe to a trained model, or to its plan with --dry-run."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pith.cli import output
from pith.cli.dry_run import dry_run
from pith.config import Recipe
from pith.errors import RequestError
from pith.launch import environment
from pith.report import Check, Report
from pith.run.job import InjectedFault, Job

DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "gloo", "nccl"]
WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a run goes: device and backend as asked for, seconds to wait, its folder, what it
    goes on with ("auto", "never" or a path) and what may differ from that."""

    device: DeviceName
    backend: BackendName
    timeout_s: float
    run_dir: Path | None
    resume: str
    allowed: tuple[str, ...]


def _seconds(value: float) -> float:
    if not 1 <= value <= WEEK_S:  # not a number is refused too
        raise typer.BadParameter(f"{value:g} is not in the range from 1 to {WEEK_S} (a week)")
    return value


def train_command(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A shipped recipe, or the path of one.")
    ] = "tiny-moe",
    *,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a value; repeatable.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start; by default pp * cp * ep * dp_shard.")
    ] = None,
    only_plan: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and start nothing.")
    ] = False,
    device: Annotated[DeviceName, typer.Option(help="Where the ranks compute.")] = "auto",
    backend: Annotated[
        BackendName, typer.Option(help="gloo lets several ranks share a GPU.")
    ] = "auto",
    timeout: Annotated[
        float, typer.Option(callback=_seconds, help="Seconds that a rank waits for another one.")
    ] = 600.0,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder; by default runs/RECIPE.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Go on with the run in its folder, begin anew, or begin with a checkpoint.",
        ),
    ] = "auto",
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="A.B", help="Resume although this value differs; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same JSON to this file.")
    ] = None,
    inject_fault: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a model. Starts its own workers, or joins a job of torchrun or SLURM."""
    output.check_out(out)
    with output.failure_to(out, verb="train"):
        num_ranks = _num_ranks(nproc, os.environ)
        loaded = Recipe.load(recipe, overrides or (), num_ranks)
        if only_plan:
            data, text = dry_run(loaded, world_size=num_ranks)
            output.emit(Report("train", data=data), json=json, out=out, text=text)
            return
        placing = Placing(device, backend, timeout, run_dir, resume, tuple(allow_change or ()))
        debug = context.find_root().obj is True
        summary = _train(loaded, num_ranks, placing, fault=inject_fault, debug=debug)
        if summary is not None:
            output.emit(_report(summary), json=json, out=out, text=_text(summary))


def _num_ranks(nproc: int | None, environ: Mapping[str, str]) -> int | None:
    """The number of ranks that was asked for, by an option or by an outer launcher."""
    outer = environment.world_size(environ)
    if nproc is not None and outer is not None and nproc != outer:
        raise RequestError(
            "launch.nproc",
            what="the outer launcher has already started another number of ranks",
            found=f"--nproc {nproc}",
            wanted=str(outer),
            next_step="leave out --nproc",
        )
    return outer or nproc


def _train(
    recipe: Recipe, world_size: int | None, placing: Placing, *, fault: str | None, debug: bool
) -> dict[str, Any] | None:
    """Train in this process where it is a rank already, in new processes where it is not."""
    if faults := recipe.not_trainable_yet():
        raise RequestError(
            "recipe.not_trainable_yet",
            what="this layout can be planned but not trained yet",
            next_step="add --dry-run to see its plan",
            faults=faults,
        )
    if fault is not None:
        InjectedFault.parse(fault)
    recipe, num_ranks = _placed(recipe), recipe.mesh(world_size).world_size
    joined = environment.joined(os.environ)

    from pith.launch import devices, elastic, worker  # noqa: PLC0415  torch only to train
    from pith.train import loop, start  # noqa: PLC0415

    device, backend = devices.choose(
        placing.device, backend=placing.backend, num_ranks=1 if joined else num_ranks
    )
    job = Job(
        recipe_toml=recipe.to_toml(),
        recipe_name=recipe.name,
        run_dir="",
        device=device,
        backend=backend,
        timeout_s=placing.timeout_s,
        debug=debug,
        fault=fault,
    )
    with ExitStack() as stack:
        finished: dict[str, Any] = {}

        def begin(job: Job) -> Job | None:
            """The job in its folder, ours from here on; None where nothing is left to do."""
            begun = stack.enter_context(
                start.begun(
                    recipe,
                    _place(recipe, placing),
                    resume=_resume(placing.resume),
                    allowed=placing.allowed,
                    facts={"world_size": num_ranks, "device": device, "backend": backend},
                )
            )
            for notice in begun.notices:
                output.say(notice)
            if begun.finished is not None:
                output.say(f"run folder {begun.folder.path}: this run is finished")
                finished.update(begun.finished)
                return None
            checkpoint = str(begun.checkpoint) if begun.checkpoint else None
            folder = begun.folder
            return replace(job, run_dir=str(folder.path), run_id=folder.id, checkpoint=checkpoint)

        if joined:
            os.environ.update(environment.rank_variables(os.environ))
            summary = worker.join(loop.run, job, begin=begin)
        elif (placed := begin(job)) is not None:  # before GPUs are taken
            summary = elastic.launch(loop.run, placed, num_ranks=num_ranks)
        else:
            summary = None
        return finished or summary


def _placed(recipe: Recipe) -> Recipe:
    """The recipe with a folder for checkpoints that is the same wherever the run goes on."""
    directory = recipe.checkpoint.directory
    if directory is None:
        return recipe
    section = recipe.checkpoint.model_copy(update={"directory": os.path.abspath(directory)})
    return recipe.model_copy(update={"checkpoint": section})


def _place(recipe: Recipe, placing: Placing) -> Path:
    """The run folder that was asked for."""
    place = Path(os.path.abspath(placing.run_dir or Path(recipe.log.directory, recipe.name)))
    if not place.name:
        raise RequestError(
            "run.folder",
            what="the root of the file system is no run folder",
            where="--run-dir",
            next_step="name a folder that can be made",
        )
    return place


def _resume(text: str) -> Literal["auto", "never"] | Path:
    match text:
        case "auto" | "never":
            return text
        case "":
            raise RequestError(
                "resume.empty",
                what="an empty path is no checkpoint",
                wanted="auto, never, or the path of a checkpoint or a run",
                where="--resume",
                next_step="leave out --resume to go on with the run in its folder",
            )
    return Path(text)


def _report(summary: Mapping[str, Any]) -> Report:
    finite = Check("last loss is finite", ok=True, found=str(summary["last_loss"]), wanted="finite")
    return Report("train", checks=(finite,), data=summary, next=_next_steps(summary))


def _next_steps(summary: Mapping[str, Any]) -> tuple[str, ...]:
    ranks = f" --nproc {summary['world_size']}" if summary["layout"]["dp"] > 1 else ""
    run_dir, longer = summary["run_dir"], f"--set training.steps={2 * summary['steps']}"
    return (
        f"pith checkpoint inspect {summary['checkpoint']}",
        f"pith train {run_dir}/config.toml --run-dir {run_dir}{ranks} {longer}",
    )


def _text(summary: Mapping[str, Any]) -> str:
    layout = ", ".join(f"{axis} {size}" for axis, size in summary["layout"].items() if size > 1)
    first, last, held_out = (
        "unknown" if loss is None else f"{loss:.4f}"
        for loss in (summary["first_loss"], summary["last_loss"], summary["validation_loss"])
    )
    speed = summary["tokens_per_second"]
    return "\n".join(
        (
            f"{summary['recipe']}: {summary['steps']} steps, {layout or 'one process'},"
            f" {summary['schedule']}",
            f"loss       {first} to {last}, validation {held_out}",
            f"speed      {'unknown' if speed is None else f'{speed:,.0f}'} tokens per second",
            f"run folder {summary['run_dir']}",
            f"checkpoint {summary['checkpoint']}",
            *(f"next       {step}" for step in _next_steps(summary)),
        )
    )
