"""Saves checkpoints while a run trains: at once, or in the background from a copy.

Every rank calls the same methods at the same steps. What one rank fails at, all ranks raise.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from pith.checkpoint.manifest import FileEntry, Manifest, describe
from pith.checkpoint.metadata import read_metadata, tensors_of
from pith.checkpoint.pieces import Piece
from pith.checkpoint.shelf import Shelf
from pith.checkpoint.store import told_as_failed, write
from pith.comm.world import World
from pith.errors import RunFailedError

# One rank may write much longer than another; a rank that dies is noticed at once all the same.
PATIENCE = timedelta(hours=1)

T = TypeVar("T")
Phase = Callable[[str, int], None]


def open_group(world: World) -> dist.ProcessGroup:
    """The group of all ranks in which checkpoints are written and loaded; every rank calls it."""
    patience = max(PATIENCE, world.timeout or PATIENCE)
    group = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Saver:
    """Writes `pieces` as they are at a step, one checkpoint at a time, through `group` alone.

    `phase` is called with "stage", "write", "commit" and "retire" and the step before each of them,
    perhaps on another thread. A context: leaving it waits for what is on its way, unless an error
    is on its own way out.
    """

    def __init__(
        self,
        shelf: Shelf,
        pieces: Mapping[str, Piece],
        *,
        world: World,
        group: dist.ProcessGroup,
        keep: int,
        asynchronous: bool,
        phase: Phase = lambda name, step: None,
    ) -> None:
        self._shelf, self._keep, self._phase = shelf, keep, phase
        self._world, self._group = world, group
        self._pieces = {name: piece for name, piece in pieces.items() if piece.owned}
        self._pool = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        # Pinned memory takes its time: it is there before the first save needs it.
        self._copies = self._pool.submit(self._allocate) if self._pool is not None else None
        self._pending: Future[tuple[str, ...]] | None = None

    def save(self, manifest: Manifest) -> tuple[str, ...]:
        """Save the step of `manifest`, whose tensors and files are filled in here.

        Returns notices of what went less than well. In the background the bytes are written later;
        a save that is still on its way is waited for first. Raises RunFailedError, on every rank,
        for values that are not finite and for a disk that fails: nothing is committed then.
        """
        notices = self.wait()
        step = manifest.position.step
        self._together("stage", step, lambda: require_finite(self._pieces))
        if self._pool is None or self._copies is None:
            return notices + self._write(self._pieces, manifest)
        copies = self._copies.result()
        self._copy(copies)
        self._pending = self._pool.submit(self._write, copies, manifest)
        return notices

    def check(self) -> tuple[str, ...]:
        """Raise what went wrong in the background, if it is known already; else its notices."""
        return self.wait() if self._pending is not None and self._pending.done() else ()

    def wait(self) -> tuple[str, ...]:
        """The same once nothing is on its way any more."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        if self._pool is not None:  # a thread that waits for ranks that failed would wait for long
            self._pool.shutdown(wait=error is None)

    def _allocate(self) -> dict[str, Piece]:
        """Memory of the host for a copy of the pieces, which every save uses again."""
        device = self._world.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        return {
            name: replace(
                piece,
                rows=torch.empty_like(piece.rows, device="cpu", pin_memory=device.type == "cuda"),
            )
            for name, piece in self._pieces.items()
        }

    def _copy(self, copies: Mapping[str, Piece]) -> None:
        """Bring the pieces as they are now to `copies`."""
        for name, piece in self._pieces.items():
            copies[name].rows.copy_(piece.rows, non_blocking=piece.rows.is_cuda)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _write(self, pieces: Mapping[str, Piece], manifest: Manifest) -> tuple[str, ...]:
        step = manifest.position.step
        folder, is_first = self._shelf.temporary(step), self._world.rank == 0
        try:
            self._together("write", step, lambda: self._shelf.begin(step) if is_first else None)
            write(pieces, folder, group=self._group)
            described = self._together("commit", step, lambda: self._describe(folder))
            self._world.together(
                lambda: self._commit(manifest, described) if is_first else None, group=self._group
            )
        except BaseException:
            if is_first:
                self._shelf.discard(step)  # it may hold the space that is missing
            raise
        retire = self._shelf.retire if is_first else lambda keep: []
        return tuple(self._together("retire", step, lambda: retire(self._keep))[self._world.rank])

    def _describe(self, folder: Path) -> tuple[FileEntry, ...]:
        """Sizes and checksums of what this rank wrote, as the disk gives it back."""
        rank = self._world.rank
        own = sorted(folder.glob(f"__{rank}_*"))
        written = [*own, folder / ".metadata"] if rank == 0 else own
        with told_as_failed(folder):
            return tuple(describe(path) for path in written)

    def _commit(self, manifest: Manifest, described: list[tuple[FileEntry, ...]]) -> Path:
        folder = self._shelf.temporary(manifest.position.step)
        files = tuple(entry for part in described for entry in part)
        for entry in files:
            if not (folder / entry.name).is_file():
                raise RunFailedError(
                    "checkpoint.not_shared",
                    what="rank 0 does not see what another rank wrote",
                    found=f"no {entry.name}",
                    wanted="a folder that all ranks share",
                    where=str(folder),
                    next_step="name one with --set checkpoint.directory=DIR",
                )
        tensors = tensors_of(read_metadata(folder))
        whole = manifest.model_copy(update={"tensors": tensors, "files": files})
        return self._shelf.commit(manifest.position.step, whole)

    def _together(self, phase: str, step: int, action: Callable[[], T]) -> list[T]:
        """Begin a phase with `action`; what it returns on each rank, or raises on any of them."""

        def begin() -> T:
            self._phase(phase, step)
            return action()

        return self._world.together(begin, group=self._group)


def require_finite(pieces: Mapping[str, Piece]) -> None:
    """Raises RunFailedError naming a tensor whose rows here hold NaN or infinity."""
    named = {name: piece.rows for name, piece in pieces.items() if piece.rows.numel()}
    if not named:
        return
    largest = torch._foreach_norm(list(named.values()), ord=float("inf"))
    is_finite = torch.stack([norm.double() for norm in largest]).isfinite().tolist()
    for name, fine in zip(named, is_finite, strict=True):
        if not fine:
            raise RunFailedError(
                "checkpoint.non_finite",
                what="values that are not finite are not saved; nothing was committed",
                found="NaN or infinity",
                wanted="finite values",
                where=name,
                next_step="lower optimizer.lr and resume from the checkpoint before",
            )
