"""`pith recipe`: the recipes as shipped, as resolved, and their schema."""

import json as json_text
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from pith.cli.output import check_out, emit
from pith.config import Recipe, shipped
from pith.report import Report

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the same JSON to this file.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a value; repeatable.")
]


def recipe_app() -> typer.Typer:
    """The commands under `pith recipe`."""
    app = typer.Typer(help="Recipes: what is shipped, resolved values, the schema.")
    app.command("list")(list_command)
    app.command("show")(show_command)
    app.command("schema")(schema_command)
    return app


def list_command(*, json: Json = False, out: Out = None) -> None:
    """List the shipped recipes."""
    check_out(out)
    recipes = [_summary(Recipe.load(name)) for name in shipped()]
    text = "\n".join(
        f"{r['recipe']:<20} {r['ranks']:>3} ranks  {r['num_parameters']:>15,} parameters"
        for r in recipes
    )
    emit(Report("recipe list", data={"recipes": recipes}), json=json, out=out, text=text)


def _summary(recipe: Recipe) -> dict[str, str | int]:
    mesh, model = recipe.mesh(), recipe.architecture
    return {
        "recipe": recipe.name,
        "ranks": mesh.world_size,
        "model_type": model.model_type,
        "num_parameters": model.num_parameters(),
    }


def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe, or a path.")],
    *,
    overrides: Set = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks that it is checked for; by default the fewest.")
    ] = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Show a recipe as resolved: every value, defaults and model fields included."""
    check_out(out)
    recipe = Recipe.load(name, overrides or (), nproc)
    text = recipe.to_toml()
    data = {"recipe": recipe.name, "digest": recipe.digest(), "values": tomllib.loads(text)}
    emit(Report("recipe show", data=data), json=json, out=out, text=text.rstrip())


def schema_command(*, json: Json = False, out: Out = None) -> None:
    """Show the JSON schema of recipe files."""
    check_out(out)
    schema = Recipe.json_schema()
    text = json_text.dumps(schema, indent=1)
    emit(Report("recipe schema", data={"schema": schema}), json=json, out=out, text=text)
