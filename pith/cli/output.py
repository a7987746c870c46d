"""How every command answers: JSON on stdout, words on stderr, the exit status from the report."""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from pith.errors import PithError, RequestError
from pith.launch.failures import RankFailedError
from pith.report import Check, Report

MOST_HELD = 24  # checks that held, a line each
UNPRINTED = "output.stdout"  # the code of the error that stdout cannot carry


def emit(report: Report, *, json: bool, out: Path | None, text: str) -> None:
    """Answer with `report`: `text` for people, one JSON object on stdout for programs.

    `out` names a file that receives the same JSON, whole or not at all. Raises RequestError when
    that file cannot be written.
    """
    if text:
        say(text)
    line = report.json() + "\n"
    if out is not None:
        write_whole(out, text=line)
    if json:
        put(line)


def conclude(report: Report, *, json: bool, out: Path | None, text: str = "") -> None:
    """Answer with what `report` checked, below `text`, and leave with its status.

    People get a line for each check that failed, and for each that held where there are few.
    """
    held = [check for check in report.checks if check.ok]
    failed = [check for check in report.checks if not check.ok]
    lines = [text] if text else []
    lines += [check_text(check) for check in (*failed, *held[:MOST_HELD])]
    if len(held) > MOST_HELD:
        lines.append(f"held   {len(held) - MOST_HELD} more, which --json lists")
    lines.append(f"{len(held)} of {len(report.checks)} checks held")
    lines += [f"next   {step}" for step in report.next]
    emit(report, json=json, out=out, text="\n".join(lines))
    raise typer.Exit(report.exit)


def check_text(check: Check) -> str:
    """One check in one line."""
    place = f" ({check.where})" if check.where else ""
    line = f"{'held  ' if check.ok else 'FAILED'} {check.name}{place}"
    if check.ok:
        return f"{line}: {check.found}" if check.found else line
    return f"{line}: found {check.found or 'nothing'}, wanted {check.wanted}"


def put(line: str) -> None:
    """Write data to stdout. Raises RequestError where it is closed or takes nothing more."""
    with to_stdout():
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")
        sys.stdout.write(line)


@contextmanager
def to_stdout() -> Iterator[None]:
    """Turn what stdout refuses, until it is flushed at the end, into a RequestError."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise RequestError(
            UNPRINTED,
            what="the answer cannot be printed",
            found=error.strerror or str(error),
            wanted="a stdout that takes it",
            where="stdout",
            next_step="give it a stdout that takes it, or a report to --out FILE",
        ) from error


def say(text: str) -> None:
    """Print `text` on stderr exactly as it is: no markup, no wrapping."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(text)


def error_text(error: PithError) -> str:
    """The error in one line, and below it one line for each fault it carries."""
    faults = (f"  {fault}" for fault in error.faults if str(fault) != error.what)
    return "\n".join((f"error: {error}", *faults))


def failure_text(error: PithError, *, debug: bool) -> str:
    """`error_text`, and below it the traceback where pith itself broke or `debug` asks for it."""
    line = error_text(error)
    if isinstance(error, RankFailedError):
        return "\n".join((line, *error.__notes__))
    if error.exit_status == PithError.exit_status or debug:
        trace = traceback.format_exception(error.__cause__ or error)
        return f"{line}\n{''.join(trace).rstrip()}"
    return line


@contextmanager
def failure_to(out: Path | None, *, verb: str) -> Iterator[None]:
    """Write the report of a PithError that passes by to `out` too."""
    try:
        yield
    except PithError as error:
        if out is not None:
            write_whole(out, text=Report.of_error(verb, error).json() + "\n")
        raise


def check_out(path: Path | None, *, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path is None:
        return
    with _writing(path, option):
        target = _target(path)
        # What is no regular file is written itself, a regular one replaced inside its folder.
        place = target if _is_special(target) else target.parent
        target.exists() or target.with_name(_part(target)).exists()  # raises for a name too long
        if not (place.is_dir() or place == target) or not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "no writable folder above")


def refuse_same(out: Path | None, page: Path | None) -> None:
    """Refuse one file for the report and the page: one would overwrite the other."""
    if out is not None and page is not None and os.path.realpath(out) == os.path.realpath(page):
        raise RequestError(
            "output.same",
            what="report and page cannot share a file",
            found=str(out),
            where="--out and --html",
            next_step="name two files",
        )


def write_whole(path: Path, *, text: str, option: str = "--out") -> None:
    """Write `text` to `path` so that a reader sees the old content or all of the new.

    A symlink stays and its target is written; so does what is no regular file, such as a FIFO.
    """
    with _writing(path, option):
        target = _target(path)
        if _is_special(target):
            target.write_text(text)
            return
        part = target.with_name(_part(target))
        try:
            part.write_text(text)
            part.replace(target)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise


def _target(path: Path) -> Path:
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder")
    return target


def _part(target: Path) -> str:
    return f".pith-{os.getpid()}-{target.name}"[: max(len(target.name), 20)]


def _is_special(target: Path) -> bool:
    return target.exists() and not target.is_file()


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    """Turn what the file system refuses into a RequestError."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, option, cause=error.strerror or str(error)) from error


def _unwritable(path: Path, option: str, *, cause: str) -> RequestError:
    return RequestError(
        "output.unwritable",
        what="it cannot be written there",
        found=cause,
        wanted="a file path inside an existing folder that can be written",
        where=f"{option} {path}",
        next_step=f"mkdir -p {path.parent}, or name another file",
    )
