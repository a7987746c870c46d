"""The run folder: where one run keeps everything it writes.

run.json           which run it is: its id, and the checkpoint that it was branched from
config.toml        the resolved recipe, loads back
environment.json   code, versions, devices
config-1.toml      what config.toml said before a resumed run changed it; environment-1.json too
metrics.jsonl      one object a step, and events
report.json        how the run ended
trace/             what ranks executed in traced steps, and when
checkpoints/       what is saved
lock               held by whoever writes here
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import pydantic

from pith.disk import sync, write_durably
from pith.errors import PithError, RequestError, RunFailedError
from pith.report import finite
from pith.run.environment import run_environment

LOCK_PATIENCE_S = 5.0  # a job that was killed a moment ago may still be going
LOCK_RETRY_S = 0.05
CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class _Identity(pydantic.BaseModel):
    """run.json."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True)

    format: Literal["pith/run/1"] = "pith/run/1"
    id: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{32}$")]
    origin: str | None
    created: str  # ISO 8601, UTC


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder. `id` is unique to the run; `origin` is the checkpoint that it was branched
    from; `notice` is a line for the user when the plain name was taken."""

    path: Path
    id: str
    origin: str | None = None
    notice: str = ""

    @classmethod
    def create(cls, directory: Path, name: str, *, origin: str | None = None) -> Self:
        """Make `directory`/`name`, or the first free of NAME-2, NAME-3 and so on.

        One process of a run calls it. An earlier run is never touched; an empty folder is free.
        Raises RequestError when the folder cannot be made.
        """
        assert Path(name).name == name, name
        now = datetime.now(UTC).isoformat(timespec="seconds")
        identity = _Identity(id=uuid4().hex, origin=origin, created=now)
        with _told("the run folder cannot be made", where=directory):
            directory.mkdir(parents=True, exist_ok=True)
        plain = directory / name
        with _told("the run folder cannot be made", where=plain):
            path = _make_free_folder(plain, identity)
        notice = "" if path == plain else f"{plain} holds an earlier run; this one is {path}"
        return cls(path, identity.id, origin, notice)

    @classmethod
    def find(cls, directory: Path, name: str, *, origin: str | None) -> Self | None:
        """The run that the same command began earlier: `directory`/`name` where it holds a run.

        With an `origin` it is the first of NAME, NAME-2 and so on that has this origin, compared
        as text: a checkpoint may be branched more than once. None where there is no such run.
        Raises RequestError where a run.json is broken.
        """
        plain = directory / name
        if origin is None:
            return cls._read(plain)
        runs = map(cls._read, takewhile(os.path.exists, _numbered(plain)))
        return next((run for run in runs if run is not None and run.origin == origin), None)

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        file = path / "run.json"
        try:
            identity = _Identity.model_validate_json(file.read_bytes())
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestError(
                "run.folder",
                what="the run folder does not say which run it holds",
                found=": ".join((*map(str, first["loc"]), first["msg"])),
                wanted="a whole run.json of the format pith/run/1",
                where=str(file),
                next_step="take --resume never, or another --run-dir",
            ) from error
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            with _told("the run folder cannot be read", where=file):
                raise
        return cls(path, identity.id, identity.origin)

    @property
    def recipe_toml(self) -> str | None:
        """The resolved recipe of the run; None where it is not written yet."""
        path = self.path / "config.toml"
        with _told("the recipe of the run cannot be read", where=path):
            try:
                return path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def finished(self) -> Path:
        """Where the report of a run lies once it has taken its last step."""
        return self.path / "report.json"

    def describe(self, recipe_toml: str, facts: Mapping[str, object]) -> None:
        """Write config.toml and environment.json; what else they said is kept beside them.

        `facts` go into environment.json: what only the caller knows, such as the world size.
        """
        environment = {**run_environment(), **facts}
        with _told("the run folder cannot be written", where=self.path):
            _renew(self.path / "config.toml", recipe_toml.encode())
            _renew(self.path / "environment.json", _as_json(environment))

    def finish(self, data: Mapping[str, object]) -> None:
        """Write the report. Raises RunFailedError where that is not possible."""
        what = "the report of the run cannot be written"
        with _told(what, where=self.finished, kind=RunFailedError):
            write_durably(self.finished, _as_json(data))

    def read_finished(self) -> dict[str, Any] | None:
        """The report that `finish` wrote; None where there is no whole one."""
        try:
            report = json.loads(self.finished.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(report, dict) and isinstance(report.get("steps"), int)
        return report if whole else None

    @contextmanager
    def lock(self) -> Iterator[str]:
        """Be the only one who writes here, until the block is left or the process ends.

        Processes that are forked meanwhile hold the lock as well, until the last of them ends.
        Yields a line for the user where the file system cannot lock, else "". Raises RequestError
        where another process holds the lock for longer than LOCK_PATIENCE_S.
        """
        file = self.path / "lock"
        with _told("the run folder cannot be locked", where=file):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with _told("the run folder cannot be locked", where=file):
                notice = _acquire(handle, self.path)
            yield notice
        finally:
            os.close(handle)  # without LOCK_UN, which would unlock it for forked ranks as well


@contextmanager
def _told(what: str, *, where: Path, kind: type[PithError] = RequestError) -> Iterator[None]:
    """What the file system refuses, or what is no text, as an error that says `what` and why."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise kind(
            "run.folder",
            what=what,
            found=(error.strerror if isinstance(error, OSError) else None) or str(error),
            wanted="a folder that can be read and written",
            where=str(where),
            next_step="name another one with --run-dir, or in log.directory",
        ) from error


def _make_free_folder(plain: Path, identity: _Identity) -> Path:
    """Make the folder whose name is free; two runs that start together get two folders.

    It has its run.json before it has its name, so that a kill leaves no folder that is no run.
    """
    draft = plain.with_name(f".{identity.id}.draft")
    draft.mkdir()
    try:
        write_durably(draft / "run.json", _as_json(identity.model_dump()))
        path = next(path for path in _numbered(plain) if _takes_place(draft, path))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(plain.parent)
    return path


def _numbered(plain: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3 and so on."""
    yield plain
    yield from (plain.with_name(f"{plain.name}-{number}") for number in count(2))


def _takes_place(draft: Path, path: Path) -> bool:
    """Rename `draft` to `path` if that is free: not there, or an empty folder."""
    try:
        draft.rename(path)
    except OSError:
        if not path.is_dir():
            raise
        return False
    return True


def _renew(path: Path, content: bytes) -> None:
    """Write `content` to `path`; other content that was there stays as NAME-1, NAME-2 and so on."""
    earlier = path.read_bytes() if path.exists() else None
    if earlier == content:
        return
    if earlier is not None:
        numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
        kept = list(takewhile(Path.exists, numbered))
        if not kept or kept[-1].read_bytes() != earlier:  # equal: killed before the last line
            write_durably(path.with_stem(f"{path.stem}-{len(kept) + 1}"), earlier)
    write_durably(path, content)


def _as_json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(finite(value), indent=1, allow_nan=False) + "\n").encode()


def _acquire(handle: int, folder: Path) -> str:
    """Lock an open file and write into it who holds it; gives the notice of RunFolder.lock."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _in_use(handle, folder) from error
            time.sleep(LOCK_RETRY_S)
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                raise
            return f"{folder} cannot be locked here: see that no other run writes to it"
    if not os.path.samestat(os.fstat(handle), os.stat(folder / "lock")):
        raise OSError(errno.ESTALE, "another folder of that name, made meanwhile")
    owner = f"{socket.gethostname()} {os.getpid()}\n".encode()
    os.ftruncate(handle, os.pwrite(handle, owner, 0))
    return ""


def _in_use(handle: int, folder: Path) -> RequestError:
    match os.pread(handle, 512, 0).decode(errors="replace").split():
        case [host, process_id] if process_id.isdecimal() and host.isprintable():
            owner = f"process {process_id} on {host}, or a rank that it started"
        case _:
            owner = "another process"
    return RequestError(
        "run.in_use",
        what="another run writes to this folder",
        found=owner,
        wanted="a folder that no running process writes to",
        where=str(folder),
        next_step="wait for it to end, or take --resume never or another --run-dir",
    )
