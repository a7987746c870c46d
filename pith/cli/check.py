"""`pith check`: operators, recipes and the repository against what they must be."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pith.cli.dry_run import dry_run
from pith.cli.output import check_out, conclude, failure_to
from pith.config import shipped
from pith.errors import Fault, RequestError
from pith.ops import operator_names
from pith.report import Check, Report

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
DeviceChoice = Literal["auto", "cpu", "cuda"]
Out = Annotated[Path | None, typer.Option("--out", help="Write the same JSON to this file.")]


def check_app() -> typer.Typer:
    """The commands under `pith check`."""
    app = typer.Typer(help="Checks: operators, models, recipes, the rules of the repository.")
    app.command("model")(model_command)
    app.command("ops")(ops_command)
    app.command("recipe")(recipe_command)
    app.command("repository")(repository_command)
    return app


def model_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="FAMILY|RECIPE...",
            help="A family: the name of its files in pith/arch and pith/models (qwen3). A shipped "
            "recipe, or the path of a recipe or a config.json: its model, scaled down to be run.",
        ),
    ],
    *,
    json: Json = False,
    out: Out = None,
) -> None:
    """Check models against transformers: names, counts, logits, gradients, FLOPs, five stages.

    A family is checked at every tiny config in pith/verify/configs/FAMILY. The report's data:
    details {check: {kind: [name]}} of names that differ.
    """
    check_out(out)
    with failure_to(out, verb="check model"):
        from pith.verify.model import check_model  # noqa: PLC0415

        checks = [*check_model(names)]
    data = {"details": {check.name: dict(check.details) for check in checks if check.details}}
    conclude(_report("check model", checks, data), json=json, out=out)


def ops_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Operators; all without.")
    ] = None,
    *,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where they compute: a GPU where there is one, or which.")
    ] = "auto",
    json: Json = False,
    out: Out = None,
) -> None:
    """Check every implementation of operators against a definition in float64."""
    check_out(out)
    with failure_to(out, verb="check ops"):
        chosen = _operators(names or ())

        from pith.launch import devices  # noqa: PLC0415  torch only to check
        from pith.verify.operators.check import check_operator, not_served  # noqa: PLC0415

        place, _ = devices.choose(device, backend="auto", num_ranks=1)
        checks = [check for name in chosen for check in check_operator(name, device=place)]
        unserved = [subject for name in chosen for subject in not_served(name, device=place)]
    text = f"not served: {', '.join(unserved)}" if unserved else ""
    data = {"device": place, "not_served": unserved}
    conclude(_report("check ops", checks, data), json=json, out=out, text=text)


def _operators(names: Sequence[str]) -> Sequence[str]:
    """The operators of these names, all without; RequestError with every unknown one."""
    known = operator_names()
    faults = tuple(
        Fault(
            "operators", repr(name), "an operator", tuple(get_close_matches(name, known)) or known
        )
        for name in names
        if name not in known
    )
    if faults:
        raise RequestError(
            "operators.unknown",
            what="no such operator",
            next_step="name operators of the list, or none for all",
            faults=faults,
        )
    return names or known


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
    conclude(_report("check recipe", checks), json=json, out=out)


def repository_command(context: typer.Context, *, json: Json = False, out: Out = None) -> None:
    """Check the rules of the house in the checkout around this folder; exit 3 outside of one."""
    check_out(out)
    with failure_to(out, verb="check repository"):
        from pith.verify.repository.checkout import Checkout  # noqa: PLC0415
        from pith.verify.repository.rules import check_repository  # noqa: PLC0415

        root: Any = context.find_root().command
        checkout = Checkout.around(Path.cwd())
        checks = [*check_repository(checkout, refusal=lambda words: refusal(root, words))]
    conclude(_report("check repository", checks), json=json, out=out)


def refusal(program: Any, words: Sequence[str]) -> str:
    """Why `words` is no command line of `program`; nothing where it is one. Runs no command."""
    node, rest = program, list(words)
    while rest and hasattr(node, "commands") and not rest[0].startswith("-"):
        if rest[0] not in node.commands:
            return f"no command {rest[0]}"
        node = node.commands[rest.pop(0)]
    if {"--help", "--version"} & set(rest):  # would answer while they are parsed
        return ""
    if hasattr(node, "commands"):
        return "a command is missing"
    try:
        node.make_context("pith", rest)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return " ".join(message().split())
    return ""


def _report(verb: str, checks: Sequence[Check], data: Mapping[str, Any] | None = None) -> Report:
    """The report of `checks`, those that failed first."""
    return Report.of_checks(verb, sorted(checks, key=lambda check: check.ok), data=data or {})
