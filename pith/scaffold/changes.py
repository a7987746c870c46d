"""What a new family changes in a checkout: compared first, then written all or not at all."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Literal

from pith.disk import write_durably
from pith.errors import UnavailableError

State = Literal["new", "changed", "kept", "unchanged"]


@dataclass(frozen=True, slots=True)
class Change:
    """One file: its content, and the one wanted. A file of the family that is there with another
    content is its developer's, and kept."""

    path: str  # under the root of the checkout
    before: bytes | None
    after: bytes
    is_shared: bool  # of all families, and so edited rather than made

    @property
    def state(self) -> State:
        if self.before is None:
            return "new"
        if self.before == self.after:
            return "unchanged"
        return "changed" if self.is_shared else "kept"

    @property
    def is_due(self) -> bool:
        return self.state in ("new", "changed")

    def diff(self) -> str:
        """What changes in a file that is there, as a unified diff."""
        old, new = (self.before or b"").decode(), self.after.decode()
        lines = unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"a/{self.path}",
            f"b/{self.path}",
        )
        return "".join(lines)


def write(root: Path, changes: Sequence[Change]) -> None:
    """Write what is due, in order. Raises UnavailableError where that fails, and then, or when it
    is interrupted, everything is as it was."""
    done: list[Change] = []
    made: list[Path] = []
    try:
        for change in changes:
            if change.is_due:
                path = root / change.path
                made += _make_folders(path.parent)
                done.append(change)
                write_durably(path, change.after)
    except BaseException as error:
        _undo(root, done, made)
        if isinstance(error, OSError):
            raise _unwritable(error, done[-1].path if done else str(root)) from error
        raise


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; the ones that were missing, the uppermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _undo(root: Path, done: Sequence[Change], made: Sequence[Path]) -> None:
    for change in reversed(done):
        with suppress(OSError):
            if change.before is None:
                (root / change.path).unlink(missing_ok=True)
            else:
                write_durably(root / change.path, change.before)
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()


def _unwritable(error: OSError, path: str) -> UnavailableError:
    return UnavailableError(
        "scaffold.unwritable",
        what="the family cannot be written, and nothing of it is left",
        found=error.strerror or str(error),
        wanted="a checkout that can be written to",
        where=str(error.filename or path),
        next_step="make room or give the right to write, then run it again",
    )
