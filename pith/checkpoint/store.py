"""Writes and loads the tensors of a checkpoint folder, in the format of torch's own DCP."""

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pith.checkpoint.manifest import faults, read
from pith.checkpoint.metadata import check_against, read_metadata
from pith.checkpoint.pieces import Piece, PiecesSavePlanner, span_of
from pith.errors import Fault, PithError, RequestError, RunFailedError, first_of


class _Writer(FileSystemWriter):
    """Says why the disk failed: an error loses what led to it on its way to another rank."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with told_as_failed(Path(self.path)):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with told_as_failed(Path(self.path)):
            super().finish(metadata, results)


def write(pieces: Mapping[str, Piece], folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Write the owned pieces of all ranks of `group` (gloo) into `folder`; every rank calls it.

    Without a group, this process alone. Any thread may call it. Raises RunFailedError on every
    rank: of the first rank that failed.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
    how: dict[str, Any] = {"storage_writer": writer, "planner": PiecesSavePlanner(pieces)}
    try:
        if group is not None:
            save({}, process_group=group, **how)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save({}, no_dist=True, **how)
    except CheckpointException as error:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, PithError) or not isinstance(cause, Exception):
            raise cause from None
        raise _failed(folder, cause) from error


def load(pieces: Mapping[str, Piece], folder: Path) -> None:
    """Fill the rows of every piece from `folder`; each rank on its own.

    Raises RequestError with every name that is missing or of another shape or type, before
    anything is filled; and for a file that does not hold what .metadata says.
    """
    _fill(pieces, folder, read_metadata(folder))


def read_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole on the CPU. Raises RequestError for any damage."""
    manifest = read(folder)
    if wrong := faults(folder, manifest, checksums=True):
        raise _unloadable(folder, "checkpoint.damaged", tuple(wrong))
    metadata = read_metadata(folder)
    check_against(metadata, manifest, folder)
    pieces = {
        name: Piece(torch.empty(entry.size, dtype=entry.properties.dtype), 0, tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _fill(pieces, folder, metadata)
    return {name: piece.rows for name, piece in pieces.items()}


def _fill(pieces: Mapping[str, Piece], folder: Path, metadata: Metadata) -> None:
    entries: dict[str, Any] = metadata.state_dict_metadata
    differing = tuple(
        Fault(name, _told(entries.get(name)), f"{piece.rows.dtype} {list(piece.shape)}")
        for name, piece in sorted(pieces.items())
        if _told(entries.get(name)) != f"{piece.rows.dtype} {list(piece.shape)}"
    )
    if differing:
        raise _unloadable(folder, "checkpoint.tensors", differing)
    parts = [
        _Part(name, piece, chunk, metadata.storage_data[MetadataIndex(name, chunk.offsets)])
        for name, piece in pieces.items()
        for chunk in entries[name].chunks
    ]
    parts = [part for part in parts if part.first_row < part.end_row]
    parts.sort(key=lambda part: (part.stored.relative_path, part.stored.offset))
    for file_name, of_file in groupby(parts, key=lambda part: part.stored.relative_path):
        with _opened(folder / file_name) as file:
            for part in of_file:
                _copy(part, file)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows that a piece and a chunk of the same tensor have in common."""

    name: str
    piece: Piece
    chunk: ChunkStorageMetadata
    stored: Any

    @property
    def first_row(self) -> int:
        return max(span_of(self.chunk)[0], self.piece.first_row)

    @property
    def end_row(self) -> int:
        return min(span_of(self.chunk)[1], self.piece.end_row)


def _opened(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error), "a file that can be read") from error


def _copy(part: _Part, file: io.BufferedReader) -> None:
    piece, path = part.piece, Path(file.name)
    wanted = f"{piece.rows.dtype} {list(part.chunk.sizes)}"
    try:
        window = cast(IO[bytes], _Window(file, part.stored.offset, part.stored.length))
        saved = torch.load(window, map_location="cpu", weights_only=True)
        found = _kind(saved)
    except Exception as error:  # torch raises many kinds for bytes that are no tensor
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise _damaged(path, f"{part.name}: {line:.200}", "a tensor") from error
    if found != wanted:  # copy_ would cast and broadcast
        raise _damaged(path, f"{part.name}: {found}", wanted)
    with torch.no_grad():
        if piece.shape:
            start = span_of(part.chunk)[0]
            target = piece.rows[part.first_row - piece.first_row : part.end_row - piece.first_row]
            target.copy_(saved[part.first_row - start : part.end_row - start])
        else:
            piece.rows.copy_(saved)


def _kind(saved: Any) -> str:
    """Type and shape of what was read, if it is a tensor whose values can be copied."""
    plain = type(saved) is Tensor and saved.layout is torch.strided and saved.device.type == "cpu"
    return f"{saved.dtype} {list(saved.shape)}" if plain else "no dense tensor"


class _Window(io.RawIOBase):
    """`length` bytes of a file from `offset` on, as a file that torch.load reads without a copy."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file = file
        self._offset, self._length, self._at = offset, length, 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _told(entry: TensorStorageMetadata | None) -> str:
    return "nothing" if entry is None else f"{entry.properties.dtype} {list(entry.size)}"


@contextmanager
def told_as_failed(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while `folder` is written into a RunFailedError with the cause."""
    try:
        yield
    except Exception as error:
        raise _failed(folder, error) from error


def _failed(folder: Path, error: BaseException) -> RunFailedError:
    """torch's writer covers what the disk said by an error of its own: the first OSError tells."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    told = getattr(cause, "strerror", None) or str(error).partition("\n")[0]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RunFailedError(
        "checkpoint.write_failed",
        what="the checkpoint could not be written; nothing was committed",
        found=f"{told} (rank {rank})",
        wanted="room and permission to write",
        where=str(folder),
        next_step="make room there, or name another folder with --set checkpoint.directory=DIR",
    )


def _damaged(path: Path, found: str, wanted: str) -> RequestError:
    fault = Fault(str(path), found, wanted)
    return _unloadable(path.parent, "checkpoint.damaged", (fault,))


def _unloadable(folder: Path, code: str, wrong: tuple[Fault, ...]) -> RequestError:
    return RequestError(
        code,
        what="the checkpoint cannot be loaded",
        found=first_of(wrong),
        where=str(folder),
        next_step=f"pith checkpoint verify {folder}",
        faults=wrong,
    )
