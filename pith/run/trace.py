"""The executed order: what each rank really ran, in the text form of the schedule table.

A file a rank, `rank-00000.txt`, a line a step, the slots of a line separated by one space.
"""

from collections.abc import Sequence
from pathlib import Path

from pith.errors import RequestError


def write_trace(folder: Path, rank: int, rows: Sequence[str]) -> Path:
    """Write the rows that `rank` ran, one a step, and return the file."""
    assert all("\n" not in row for row in rows), rows
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(rank)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def read_trace(folder: Path, *, step: int = 0) -> tuple[str, ...]:
    """What every rank ran in its `step`-th traced step: one row a rank, as `Table.row_texts`.

    Raises RequestError when there is no trace, a rank's file is missing or a file is cut short.
    """
    names = {path.name for path in folder.glob("rank-*.txt")}
    if not names:
        raise _unreadable(folder, found="no rank-*.txt")
    return tuple(_read_row(folder / _file_name(rank), step=step) for rank in range(len(names)))


def _read_row(path: Path, *, step: int) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, found=str(error)) from error
    rows = text.splitlines()
    if not text.endswith("\n") or step >= len(rows):
        raise _unreadable(path, found=f"{text.count(chr(10))} whole lines, asked for {step + 1}")
    return rows[step]


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.txt"


def _unreadable(path: Path, *, found: str) -> RequestError:
    return RequestError(
        "trace.unreadable",
        what="the executed order cannot be read",
        found=found,
        wanted="one file a rank, numbered from 0, each a line a step",
        where=str(path),
    )
