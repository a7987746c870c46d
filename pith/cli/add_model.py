"""`pith add-model`: the files of a new model family, from its config.json."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pith.cli.output import check_out, conclude, emit, failure_to
from pith.errors import shown
from pith.report import Check, Report
from pith.scaffold.changes import Change, write
from pith.scaffold.facts import assumptions, has_experts, scaled_rope
from pith.scaffold.family import Family
from pith.scaffold.given import read
from pith.scaffold.plan import checkout, plan
from pith.scaffold.proof import prove
from pith.scaffold.texts import facts_path


def add_model_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The new family: the name of its files.")
    ],
    *,
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The config.json of the model on the Hub.")
    ],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help="Begin with the layers of this family: its classes of facts and stages are "
            "subclassed, so that its tensors and its attention are there from the start. The "
            "config is read anew. `plain` is a plain decoder; without this option the config "
            "decides.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same JSON to this file.")
    ] = None,
) -> None:
    """Add a model family to this checkout: code that trains on plain parts, its tiny config, test
    and recipe. `pith check model NAME` then says what is still to be met.

    The same command again completes what is missing and keeps what has been changed since.
    """
    check_out(out)
    with failure_to(out, verb="add-model"):
        root = checkout()
        family, changes = plan(name, read(config), like=like, root=root)
        data = _data(family, changes, root)
        text = _text(family, changes, root)
        if dry_run:
            diffs = "".join(change.diff() for change in changes if change.state == "changed")
            report = Report("add-model", data=data | {"diff": diffs})
            emit(report, json=json, out=out, text=f"{text}\n{diffs}".rstrip())
            return
        write(root, changes)
        proof = prove(name, root=root)
    report = Report.of_checks(
        "add-model",
        [_compiled(changes, root), *proof.checks],
        data=data | {"unread": list(proof.unread)},
        next=_next(family, proof.unread),
    )
    conclude(report, json=json, out=out, text=text)


def _compiled(changes: list[Change], root: Path) -> Check:
    """Every file of Python that the family has or touches compiles as it stands now."""
    paths = [change.path for change in changes if change.path.endswith(".py")]
    for path in paths:
        try:
            compile((root / path).read_bytes(), path, "exec")
        except SyntaxError as error:
            found = f"line {error.lineno}: {error.msg}"
            return Check("the files compile", False, found, "Python", path)
    return Check("the files compile", True, f"{len(paths)} files")


def _next(family: Family, unread: tuple[str, ...]) -> list[str]:
    """The commands that prove the family, then what the config shows to be missing."""
    name, fields, facts = family.name, family.given.fields, facts_path(family.name)
    layout = "pp=2,ep=2" if has_experts(fields) else "pp=2"
    steps = [
        f"pith check model {name}",
        f"pith validate {name} --scale-down --layouts {layout}",
        f"pith train {name} --dry-run",
        f"pith train {name} --set data.corpus=PATH, with a PATH made by pith tokenize",
    ]
    scaled = scaled_rope(fields)
    for key in unread:
        value = f"type {scaled[key]}" if key in scaled else shown(fields.get(key))
        steps.append(f"{facts} examine: read {key} ({value} in this config), or refuse it by name")
    steps += [f"{facts} examine: {text}: say what is right" for text in assumptions(fields)]
    return steps


def _data(family: Family, changes: list[Change], root: Path) -> dict[str, Any]:
    return {
        "family": family.name,
        "model_type": family.given.model_type,
        "like": family.start.family,
        "why": family.start.why,
        "root": str(root),
        "files": [{"path": change.path, "state": change.state} for change in changes],
    }


def _text(family: Family, changes: list[Change], root: Path) -> str:
    notes = {"kept": ": differs from what add-model writes"}
    lines = [
        f"{family.name}: {family.given.model_type} in {root}",
        f"like       {family.start.family}: {family.start.why}",
        *(f"{change.state:<10} {change.path}{notes.get(change.state, '')}" for change in changes),
    ]
    if not any(change.is_due for change in changes):
        lines.append("everything is there: nothing to write")
    return "\n".join(lines)
