"""The folder that holds the checkpoints of one run: what is there, and how that changes.

    owner.json               the run that saves here
    step-00000004            a checkpoint; a name that is there was complete once
    step-00000008.tmp        a save on its way, or one that was interrupted
    step-00000006.damaged    what bore a step's name without being complete, set aside

Nothing becomes visible but by one rename, and nothing is deleted while it bears a step's name.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import pydantic

from pith.checkpoint.manifest import MANIFEST, Manifest, decode, encode, faults, read
from pith.disk import is_disk_trouble, sync
from pith.errors import Fault, PithError, RequestError, RunFailedError

OWNER = "owner.json"
_STEP = re.compile(r"step-([0-9]{8,})")
_TEMPORARY = re.compile(r"(step-[0-9]{8,})\.tmp")
_ASIDE = re.compile(r"(.+)\.damaged(-[0-9]+)?")
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is a checkpoint or looks like one; `faults` say why it is not complete.

    `step` is None unless the name is exactly a step's, `manifest` unless it can be read.
    """

    path: Path
    step: int | None
    manifest: Manifest | None
    faults: tuple[Fault, ...]

    @property
    def complete(self) -> bool:
        return not self.faults


class _Owner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True)

    run: str
    run_dir: str


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def look(path: Path) -> Found:
    """What is at `path`: a complete checkpoint, by name, manifest and sizes, or why it is none."""
    step = step_of(path.name)
    if step is None:
        return Found(path, None, None, (_misnamed(path),))
    try:
        manifest = read(path)
        wrong = faults(path, manifest, checksums=False)
    except RequestError as error:
        return Found(path, step, None, (_unreadable(path, error),))
    if manifest.position.step != step:
        says = f"step {manifest.position.step}"
        wrong.insert(0, Fault(str(path / MANIFEST), says, f"step {step}, as the folder's name"))
    return Found(path, step, manifest, tuple(wrong))


class Shelf:
    """The checkpoints below one folder. One process calls it, but for `find` and `newest`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / name_of(step)

    def temporary(self, step: int) -> Path:
        """Where it lies before it is complete."""
        return self.path / f"{name_of(step)}.tmp"

    def find(self) -> list[Found]:
        """Everything that is a checkpoint or looks like one, ascending by step; the rest last.

        A folder that is missing holds nothing. Raises RequestError for one that cannot be read.
        """
        found = [look(self.path / name) for name in self._names()]
        return sorted(found, key=lambda f: (f.step is None, f.step or 0, f.path.name))

    def newest(self) -> Found | None:
        """The complete checkpoint with the highest step. Raises RequestError like `find`."""
        return next(self._complete(), None)

    def claim(self, run: str, run_dir: str) -> None:
        """Make the folder that of a run, or see that it is already.

        Raises RequestError when it is another run's or holds what this run did not save. Of runs
        that claim it at once, one wins.
        """
        with _changing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / OWNER).exists():
                self._refuse_ownerless()
                sayable = run_dir.encode(errors="replace").decode()
                self._write_owner(_Owner(run=run, run_dir=sayable))
        owner = self._owner()
        if owner.run != run:
            raise self._owned(f"the checkpoints of another run, {owner.run} in {owner.run_dir}")
        for found in self.find():
            if found.manifest is not None and found.manifest.run != run:
                saved = f"{found.path.name}, which another run ({found.manifest.run}) saved"
                raise self._owned(saved)

    def begin(self, step: int) -> Path:
        """Make the empty folder that a save is written to; an interrupted one there is removed.

        Raises RequestError when something bears the step's name already: weights are never saved
        over something. Raises RunFailedError when the disk fails.
        """
        self._refuse_existing(step)
        with _changing(self.temporary(step)):
            _remove(self.temporary(step))
            self.temporary(step).mkdir(parents=True)
        return self.temporary(step)

    def commit(self, step: int, manifest: Manifest) -> Path:
        """Make what was written, and synced, since `begin` the checkpoint of `step`.

        Raises like `begin`, and RunFailedError when the files are not those of the manifest.
        """
        assert manifest.position.step == step, (manifest.position.step, step)
        draft, content = self.temporary(step), encode(manifest)
        assert decode(content) == manifest, "a manifest that does not load back"
        self._refuse_existing(step)
        if wrong := faults(draft, manifest, checksums=False):
            raise _write_failed(draft, cause=str(wrong[0]), wrong=tuple(wrong))
        with _changing(draft):
            (draft / MANIFEST).write_bytes(content)
            sync(draft / MANIFEST)
            sync(draft)
            draft.rename(self.folder(step))
            sync(self.path)
        return self.folder(step)

    def discard(self, step: int) -> None:
        """Remove what a save has written so far, as far as that is possible."""
        with suppress(OSError, ValueError):
            _remove(self.temporary(step))

    def set_aside(self, after: int) -> list[tuple[Path, Path]]:
        """Rename what bears the name of a later step without being complete: (old, new) of each.

        Saves to come find their names free then. Raises RequestError when it cannot be renamed.
        """
        broken = [found for found in self.find() if not found.complete]
        late = [found.path for found in broken if found.step is not None and found.step > after]
        moved = [(path, _free_name(path)) for path in late]
        for old, new in moved:
            with _changing(old):
                old.rename(new)
        return moved

    def retire(self, keep: int) -> list[str]:
        """Delete complete checkpoints beyond the newest `keep`, and interrupted saves; 0: nothing.

        Only what a newer complete one, whose sizes were compared just now, makes superfluous goes.
        Returns a notice for each thing that could not be deleted; raises nothing.
        """
        if keep == 0:
            return []
        try:
            left = [self.path / n for n in self._names() if _TEMPORARY.fullmatch(n)]
            old = [found.path for found in self._complete()][keep:]
        except PithError as error:
            return [f"old checkpoints are not deleted: {error}"]
        deletions = [_delete(path) for path in (*left, *reversed(old))]
        return [notice for notice in deletions if notice]

    def _names(self) -> list[str]:
        """The names that mean a checkpoint or look like it."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise _unusable(self.path, error) from error
        return [name for name in names if name.startswith("step-") or _ASIDE.fullmatch(name)]

    def _complete(self) -> Iterator[Found]:
        """The complete checkpoints, newest first; those that nobody asks for are not read."""
        steps = {step: name for name in self._names() if (step := step_of(name)) is not None}
        found = (look(self.path / steps[step]) for step in sorted(steps, reverse=True))
        return (entry for entry in found if entry.complete)

    def _write_owner(self, owner: _Owner) -> None:
        """Write owner.json whole, unless one is there by now."""
        draft = self.path / f".{OWNER}.{uuid.uuid4().hex}"
        try:
            with draft.open("x", encoding="utf-8") as file:
                json.dump(owner.model_dump(), file)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                _link(draft, self.path / OWNER)
            sync(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def _owner(self) -> _Owner:
        try:
            return _Owner.model_validate_json((self.path / OWNER).read_bytes())
        except OSError as error:
            raise _unusable(self.path / OWNER, error) from error
        except pydantic.ValidationError:
            raise self._owned(f"a broken {OWNER}, so nobody knows whose it is") from None

    def _refuse_ownerless(self) -> None:
        if (newest := self.newest()) is not None:
            raise self._owned(f"{newest.path.name} and no {OWNER}, so nobody knows whose it is")

    def _owned(self, found: str) -> RequestError:
        return RequestError(
            "checkpoint.owned",
            what="this folder cannot take the checkpoints of this run",
            found=found,
            wanted="a folder of its own for each run",
            where=str(self.path),
            next_step="name another one with --set checkpoint.directory=DIR",
        )

    def _refuse_existing(self, step: int) -> None:
        if os.path.lexists(self.folder(step)):
            raise RequestError(
                "checkpoint.exists",
                what="weights are never saved over something",
                found=f"{name_of(step)} is there already",
                wanted="a name that is free",
                where=str(self.folder(step)),
                next_step="move it away, or name another checkpoint.directory",
            )


def _misnamed(path: Path) -> Fault:
    if match := _TEMPORARY.fullmatch(path.name):
        return Fault(str(path), "an interrupted save", match[1])
    if match := _ASIDE.fullmatch(path.name):
        return Fault(str(path), "something set aside as not complete", match[1])
    return Fault(str(path), f"the name {path.name}", "step- and eight digits")


def _unreadable(path: Path, error: RequestError) -> Fault:
    """Why nothing can be said of the files in `path`."""
    try:
        if not path.is_dir():
            found = "no folder" if os.path.lexists(path) else "no such folder"
            return Fault(str(path), found, "a checkpoint's folder")
        if not os.listdir(path):
            return Fault(str(path), "an empty folder", error.wanted)
    except OSError as trouble:
        return Fault(str(path), trouble.strerror or str(trouble), error.wanted)
    return Fault(error.where, error.found, error.wanted)


def _free_name(path: Path) -> Path:
    names = chain(["damaged"], (f"damaged-{number}" for number in count(2)))
    paths = (path.with_name(f"{path.name}.{name}") for name in names)
    return next(free for free in paths if not os.path.lexists(free))


def _delete(path: Path) -> str:
    """Delete something below its temporary name, so that a kill leaves no half checkpoint."""
    try:
        doomed = path if _TEMPORARY.fullmatch(path.name) else path.rename(f"{path}.tmp")
        _remove(doomed)
    except OSError as error:
        return f"{path} could not be deleted ({error.strerror or error})"
    return ""


def _remove(path: Path) -> None:
    """Remove whatever is at `path`; what a link leads to stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _link(draft: Path, path: Path) -> None:
    """Let `path` be the file `draft`. Raises FileExistsError when something is there."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with path.open("xb") as file:
            file.write(draft.read_bytes())


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Name the path, and what to do, where the file system refuses a change."""
    try:
        yield
    except OSError as error:
        if is_disk_trouble(error):
            raise _write_failed(path, cause=error.strerror or str(error)) from error
        raise _unusable(path, error) from error
    except ValueError as error:  # a NUL in the path
        raise _unusable(path, error) from error


def _write_failed(path: Path, *, cause: str, wrong: tuple[Fault, ...] = ()) -> RunFailedError:
    return RunFailedError(
        "checkpoint.write_failed",
        what="the checkpoint could not be written; nothing was committed",
        found=cause,
        where=str(path),
        next_step="make space or name another checkpoint.directory, and run the same command again",
        faults=wrong,
    )


def _unusable(path: Path, error: OSError | ValueError) -> RequestError:
    return RequestError(
        "checkpoint.folder",
        what="the folder of the checkpoints cannot be used",
        found=getattr(error, "strerror", None) or str(error),
        wanted="a folder that can be read and written",
        where=str(path),
        next_step="name another one with --set checkpoint.directory=DIR",
    )
