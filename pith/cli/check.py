"""`pith check`: operators, recipes and the repository against what they must be."""

from pathlib import Path
from typing import Annotated

import typer

from pith.cli.dry_run import dry_run
from pith.cli.output import check_out, conclude, failure_to
from pith.config import shipped
from pith.report import Check, Report

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the same JSON to this file.")]


def check_app() -> typer.Typer:
    """The commands under `pith check`."""
    app = typer.Typer(help="Checks: operators, recipes, the rules of the repository.")
    app.command("recipe")(recipe_command)
    return app


def recipe_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Shipped recipes or paths; all shipped without."),
    ] = None,
    *,
    json: Json = False,
    out: Out = None,
) -> None:
    """Check recipes: they load, round trip, plan, and their schedules verify."""
    check_out(out)
    with failure_to(out, verb="check recipe"):
        from pith.verify.recipe import check_recipe  # noqa: PLC0415  keeps `--help` instant

        checks = [
            check
            for name in names or shipped()
            for check in check_recipe(name, dry_run=lambda recipe: dry_run(recipe)[0])
        ]
    _conclude("check recipe", checks, json=json, out=out)


def _conclude(verb: str, checks: list[Check], *, json: bool, out: Path | None) -> None:
    """Answer with `checks`, those that failed first."""
    ordered = sorted(checks, key=lambda check: check.ok)
    held = sum(check.ok for check in checks)
    text = f"{held} of {len(checks)} checks held"
    conclude(Report.of_checks(verb, ordered, data={}), json=json, out=out, text=text)
