"""`pith validate`: the working tree against a commit, and layouts against one process.

JSON data of --against: that of `pith compare` (A is the commit, B the working tree), and folder,
where both runs lie. Of --layouts: first_difference, max_relative, steps_compared, and layouts with
the figures of each. With both, that of --layouts lies under the key layout_parity.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pith.cli import output
from pith.cli.compare import Html, MaxMemory, MinSpeed, Reordered
from pith.cli.recipe import Json, Out, Set
from pith.cli.train import DeviceName
from pith.config import Recipe
from pith.config.scaled import scaled_down
from pith.errors import RequestError
from pith.launch import environment
from pith.report import Check, Report

VERB = "validate"
PLACE = Path("runs", "validate")
MOST_PARAMETERS = 100_000_000  # one process computes and keeps them several times in float64


@dataclass(frozen=True, slots=True)
class Findings:
    """What one kind of validation found."""

    checks: tuple[Check, ...]
    data: dict[str, Any]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What both sides train and how their runs are compared: `options` are of `pith train`,
    `python` is the interpreter of the commit, ratios of the working tree by the commit."""

    recipe: Recipe
    steps: int
    options: tuple[str, ...]
    python: Path | None
    reordered: bool
    min_speed: float | None
    max_memory: float | None
    html: Path | None


def validate_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [LAYOUT]...", help="tiny-moe by default; more layouts."),
    ] = None,
    *,
    against: Annotated[
        str | None,
        typer.Option(metavar="REF", help="Train this commit and the working tree, and compare."),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(metavar="pp=2,ep=2", help="Compare with one process; repeatable, or all."),
    ] = None,
    overrides: Set = None,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps to train; half way the working tree is killed once.")
    ] = 20,
    scale_down: Annotated[
        bool, typer.Option("--scale-down", help="A tiny model of the same structure.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each run; by default the fewest.")
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where the ranks compute.")] = "auto",
    timeout: Annotated[
        int, typer.Option(min=1, help="Seconds that a rank waits for another one.")
    ] = 120,
    reordered: Reordered = False,
    min_speed: MinSpeed = None,
    max_memory: MaxMemory = None,
    html: Html = None,
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The interpreter that runs REF.")
    ] = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Prove that a change left training as it was: against a commit, on other layouts, or both."""
    output.check_out(out)
    output.check_out(html, option="--html")
    with output.failure_to(out, verb=VERB):
        output.refuse_same(out, html)
        recipe, asked = _read(words or (), layouts or (), overrides or (), nproc=nproc)
        of_runs = {
            "--reordered": reordered,
            "--min-speed": min_speed is not None,
            "--max-memory": max_memory is not None,
            "--html": html is not None,
            "--python": python is not None,
        }
        _refuse_idle(against, asked, [option for option, given in of_runs.items() if given])
        if scale_down:
            recipe = scaled_down(recipe, world_size=nproc, steps=steps)
        found: dict[str, Findings] = {}
        if asked:
            found["layout_parity"] = _layouts(recipe, asked, device=device)
        if against is not None:
            ranks = (f"--nproc={nproc}",) if nproc else ()
            options = (*ranks, f"--device={device}", f"--timeout={timeout}")
            wanted = Wanted(recipe, steps, options, python, reordered, min_speed, max_memory, html)
            found[VERB] = _guarded(against, wanted)
    report = Report.of_checks(
        VERB,
        [check for part in found.values() for check in part.checks],
        data=_data(found),
    )
    text = "\n".join(part.text for part in found.values() if part.text)
    output.conclude(report, json=json, out=out, text=text)


def _data(found: dict[str, Findings]) -> dict[str, Any]:
    if len(found) == 1:
        return next(iter(found.values())).data
    return found[VERB].data | {"layout_parity": found["layout_parity"].data}


def _read(
    words: Sequence[str], layouts: Sequence[str], overrides: Sequence[str], *, nproc: int | None
) -> tuple[Recipe, list[str]]:
    """The recipe and the layouts: a word with an equals sign is one."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise RequestError(
            "usage",
            what="more than one recipe",
            found=" ".join(names),
            wanted="one; a layout is written as pp=2,ep=2",
            next_step="pith validate --help",
        )
    asked = [word for word in words if "=" in word]
    asked += [layout for text in layouts for layout in text.split() or [text]]
    return Recipe.load(names[0] if names else "tiny-moe", overrides, nproc), asked


def _refuse_idle(against: str | None, layouts: Sequence[str], of_runs: Sequence[str]) -> None:
    """Refuse a request in which something would not be looked at; `of_runs` compare two runs."""
    if against is None and not layouts:
        raise RequestError(
            "validate.nothing",
            what="nothing to compare with",
            wanted="--against REF, or --layouts pp=2,ep=2, or --layouts all",
            next_step="pith validate --against HEAD",
        )
    if against is None and of_runs:
        raise RequestError(
            "validate.options",
            what="these options say how two runs are compared, and there are none",
            found=", ".join(of_runs),
            wanted="--against REF beside them",
            next_step="leave them out, or add --against HEAD",
        )
    if environment.joined(os.environ):
        raise RequestError(
            "validate.launch",
            what="validate starts its own ranks",
            found="an outer launcher",
            next_step="run it alone, not under torchrun or srun",
        )


def _layouts(recipe: Recipe, asked: Sequence[str], *, device: DeviceName) -> Findings:
    from pith.verify import parity  # noqa: PLC0415 - loads torch

    size = recipe.architecture.num_parameters()
    if size > MOST_PARAMETERS:
        raise RequestError(
            "validate.size",
            what="this model is too large to be computed in float64 by one process",
            found=f"{size:,} parameters",
            wanted=f"at most {MOST_PARAMETERS:,}",
            where=recipe.name,
            next_step="add --scale-down, which keeps its structure",
        )
    several = parity.default_layouts(recipe) if "all" in asked else ()
    texts = [text for text in asked if text != "all"]
    named = parity.parse_layouts(texts) if texts else ()
    found = parity.check_layouts(
        recipe, tuple(dict.fromkeys((*several, *named))), device=device, say=output.say
    )
    no_ratios = {"speed_ratio": None, "memory_ratio": None}  # two runs have them
    return Findings(found.checks, found.data | no_ratios)


def _guarded(ref: str, wanted: Wanted) -> Findings:
    from pith.verify.against import interrupted_by_sigterm  # noqa: PLC0415

    with interrupted_by_sigterm():
        return _against(ref, wanted)


def _against(ref: str, wanted: Wanted) -> Findings:
    from pith.verify import against, telling  # noqa: PLC0415 - these load torch
    from pith.verify.compare import compare, cost_checks  # noqa: PLC0415

    tree, half = against.working_tree(), wanted.steps // 2
    python = _interpreter(wanted.python)
    with against.commit_tree(ref, tree, python=python, say=output.say) as baseline:
        folder = _new_folder(wanted.recipe.name)
        recipe = against.write_recipe(wanted.recipe, folder, steps=wanted.steps, break_after=half)
        output.say(f"{ref} ({baseline.version}) trains {wanted.steps} steps in {folder}/before")
        before = against.train(baseline, recipe, wanted.options, run_dir=folder / "before")
    output.say(f"{tree.label} ({tree.version}) trains them in {folder}/after, killed half way")
    checks, after = against.train_with_a_break(
        tree, recipe, wanted.options, run_dir=folder / "after", after=half
    )
    if after is None:
        return Findings(checks, {"folder": str(folder)})
    found = compare(before, after, reordered=wanted.reordered)
    costs = cost_checks(found, min_speed=wanted.min_speed, max_memory=wanted.max_memory)
    checks = (*checks, *found.checks, *costs)
    if wanted.html is not None:
        page = telling.html(found, checks)
        output.write_whole(wanted.html, text=page, option="--html")
    html = str(wanted.html) if wanted.html else None
    return Findings(
        checks, {**found.data, "folder": str(folder), "html": html}, telling.text(found)
    )


def _interpreter(path: Path | None) -> str | None:
    """The interpreter that was named, wherever runs take place."""
    if path is None:
        return None
    # A link is kept: to a virtual environment its own path is what matters.
    found = os.path.abspath(path)
    if not os.path.isfile(found) or not os.access(found, os.X_OK):
        raise RequestError(
            "validate.python",
            what="this is no interpreter",
            found=str(path),
            wanted="an executable of Python",
            where="--python",
            next_step="name one, such as .venv/bin/python",
        )
    return found


def _new_folder(name: str) -> Path:
    """A folder of its own for the two runs, which stay for `pith compare`."""
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=PLACE)).absolute()
    except OSError as error:
        raise RequestError(
            "validate.folder",
            what="the runs cannot be written there",
            found=error.strerror or str(error),
            wanted="a working folder that can be written",
            where=str(PLACE.absolute()),
            next_step="change to another folder",
        ) from error
