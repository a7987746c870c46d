"""The `pith` program: the tree of commands, and the way from an exception to an exit status."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated

import typer
import typer.main

import pith
from pith.cli import output
from pith.cli.add_model import add_model_command
from pith.cli.check import check_app
from pith.cli.checkpoint import checkpoint_app
from pith.cli.compare import compare_command
from pith.cli.recipe import recipe_app
from pith.cli.schedule import schedule_app
from pith.cli.tokenize import tokenize_command
from pith.cli.train import train_command
from pith.cli.validate import validate_command
from pith.errors import PithError, RequestError, StoppedError
from pith.launch import environment
from pith.report import Report


class InterruptedRunError(PithError):
    """Ctrl-C: nothing is said of it to people, and the status is the shell's own."""

    exit_status = 130


def main() -> None:
    """The console script."""
    _occupy_closed()
    status = run(sys.argv[1:])
    if status and environment.joined(os.environ):
        # Its peers may be gone: a rank of a failed job leaves without draining its collectives.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _occupy_closed() -> None:
    """Let standard files that came closed lead nowhere, before another file takes their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit status; every failure is printed, none escapes."""
    debug = "--debug" in args
    words = [word for word in args if word != "--debug"] or ["--help"]
    command = typer.main.get_command(build())
    try:
        # Help and version are printed by Typer, and nothing else is done beside them.
        told = {"--help", "--version"} & set(words)
        with output.to_stdout() if told else nullcontext():
            status = command.main(words, prog_name="pith", standalone_mode=False, obj=debug)
    except (KeyboardInterrupt, typer.Abort):
        status = InterruptedRunError.exit_status
    except PithError as error:
        return _fail(error, words, debug=debug)
    except Exception as error:
        if usage := _usage_error(error):
            return _fail(usage, words, debug=debug)
        broken = PithError("pith.broken", what=f"{type(error).__name__}: {error}")
        broken.__cause__ = error
        return _fail(broken, words, debug=debug)
    if status == InterruptedRunError.exit_status:  # what Typer makes of Ctrl-C too
        stop = InterruptedRunError("run.interrupted", what="interrupted", next_step="run again")
        return _fail(stop, words, debug=debug)
    return status if isinstance(status, int) else 0


def build() -> typer.Typer:
    """The tree of commands. Importing it stays free of torch: `pith --help` answers at once."""
    app = typer.Typer(
        help="Verifiable skills around a Mixture-of-Experts trainer.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    app.command("train")(train_command)
    app.command("validate")(validate_command)
    app.command("tokenize")(tokenize_command)
    app.command("compare")(compare_command)
    app.command("add-model")(add_model_command)
    app.add_typer(recipe_app(), name="recipe")
    app.add_typer(checkpoint_app(), name="checkpoint")
    app.add_typer(schedule_app(), name="schedule")
    app.add_typer(check_app(), name="check")
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(pith.__version__)
        raise typer.Exit(0)


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; accepted after any command.")
    ] = False,
) -> None:
    pass


def _fail(error: PithError, words: Sequence[str], *, debug: bool) -> int:
    """Print `error` as its kind asks, in JSON too where that was asked for."""
    report = Report.of_error(_verb(words), error)
    if "--json" in words and error.code != output.UNPRINTED:
        output.emit(report, json=True, out=None, text="")
    if isinstance(error, StoppedError):
        output.say(str(error))  # what was saved is no error, and has no traceback
    elif not isinstance(error, InterruptedRunError):
        output.say(output.failure_text(error, debug=debug))
    return error.exit_status


def _usage_error(error: Exception) -> RequestError | None:
    """A command line that Typer refused, as a request error; None for any other exception."""
    message = getattr(error, "format_message", None)
    if message is None or getattr(error, "exit_code", None) != RequestError.exit_status:
        return None
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "pith"
    what = " ".join(message().split()) if path == "pith" or message() else "a command is missing"
    return RequestError("usage", what=what, next_step=f"{path} --help")


def _verb(words: Sequence[str]) -> str:
    """The command that was meant: the leading words, as far as they name commands."""
    return " ".join(_commands(words)) or "pith"


def _commands(words: Sequence[str]) -> Iterator[str]:
    node: object = typer.main.get_command(build())
    for word in words:
        node = getattr(node, "commands", {}).get(word)
        if node is None:
            return
        yield word
