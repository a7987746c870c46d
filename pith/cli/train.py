"""`pith train`: from a recipe to a trained model, or to its plan with --dry-run."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pith.cli import output
from pith.cli.dry_run import dry_run
from pith.config import Recipe
from pith.errors import PithError, RequestError
from pith.launch import environment
from pith.report import Check, Report
from pith.run.folder import RunFolder
from pith.run.job import InjectedFault, Job

DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "gloo", "nccl"]
WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a run goes: device and backend as asked for, seconds to wait, its folder."""

    device: DeviceName
    backend: BackendName
    timeout_s: float
    run_dir: Path | None


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
        placing = Placing(device, backend, timeout, run_dir)
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
    num_ranks = recipe.mesh(world_size).world_size
    joined = environment.joined(os.environ)

    from pith.launch import devices, elastic, worker  # noqa: PLC0415  torch only to train
    from pith.train import loop  # noqa: PLC0415

    device, backend = devices.choose(
        placing.device, backend=placing.backend, num_ranks=1 if joined else num_ranks
    )
    facts = {"world_size": num_ranks, "device": device, "backend": backend}

    def make_folder() -> Path:
        place = Path(os.path.abspath(placing.run_dir or Path(recipe.log.directory, recipe.name)))
        if not place.name:
            raise RequestError(
                "run.folder",
                what="the root of the file system is no run folder",
                where="--run-dir",
                next_step="name a folder that can be made",
            )
        toml = recipe.to_toml()
        folder = RunFolder.create(place.parent, place.name, recipe_toml=toml, facts=facts)
        try:
            loop.open_data(recipe, work_dir=folder.path, verify=False)  # before GPUs are taken
        except PithError:
            shutil.rmtree(folder.path)
            raise
        output.say(folder.notice or f"run folder {folder.path}")
        return folder.path

    run_dir = "" if joined else str(make_folder())
    job = Job(
        recipe.to_toml(), recipe.name, run_dir, device, backend, placing.timeout_s, debug, fault
    )
    if joined:
        os.environ.update(environment.rank_variables(os.environ))
        return worker.join(loop.run, job, make_folder=make_folder)
    return elastic.launch(loop.run, job, num_ranks=num_ranks)


def _report(summary: Mapping[str, Any]) -> Report:
    finite = Check("last loss is finite", ok=True, found=str(summary["last_loss"]), wanted="finite")
    return Report("train", checks=(finite,), data=summary, next=_next_steps(summary))


def _next_steps(summary: Mapping[str, Any]) -> tuple[str, ...]:
    ranks = f" --nproc {summary['world_size']}" if summary["layout"]["dp"] > 1 else ""
    longer = f"--set training.steps={2 * summary['steps']}"
    return (
        f"pith recipe show {summary['run_dir']}/config.toml{ranks}",
        f"pith train {summary['run_dir']}/config.toml{ranks} {longer}",
    )


def _text(summary: Mapping[str, Any]) -> str:
    layout = ", ".join(f"{axis} {size}" for axis, size in summary["layout"].items() if size > 1)
    held_out = summary["validation_loss"]
    validation = "" if held_out is None else f", validation {held_out:.4f}"
    return "\n".join(
        (
            f"{summary['recipe']}: {summary['steps']} steps, {layout or 'one process'},"
            f" {summary['schedule']}",
            f"loss       {summary['first_loss']:.4f} to {summary['last_loss']:.4f}{validation}",
            f"speed      {summary['tokens_per_second']:,.0f} tokens per second",
            f"run folder {summary['run_dir']}",
            f"weights    {summary['checkpoint']}",
            *(f"next       {step}" for step in _next_steps(summary)),
        )
    )
