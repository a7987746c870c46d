"""Two ranks that save while they train end with whole checkpoints, or both with one error."""

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pith.checkpoint.manifest import Manifest, Position
from pith.checkpoint.pieces import Piece
from pith.checkpoint.saver import Phase, Saver, open_group
from pith.checkpoint.shelf import Shelf
from pith.checkpoint.store import read_whole
from pith.comm.world import World
from pith.errors import PithError, RequestError, RunFailedError
from tests.checkpoint.by_hand import bare_manifest
from tests.conftest import RunRanks

ROWS = 5000  # on each rank: more bytes than SMALL_DISK
SMALL_DISK = 1 << 16


class Ranks:
    """What one of two ranks saves, and how: weights, a moment, and a norm that rank 0 owns."""

    def __init__(self, directory: Path) -> None:
        self.shelf, self.world = Shelf(directory), World.joined(torch.device("cpu"))
        self.group = open_group(self.world)
        make = torch.Generator().manual_seed(11)
        shape, first = (2 * ROWS, 4), self.world.rank * ROWS
        self.whole = {
            "model.w": torch.randn(shape, generator=make),
            "optimizer.exp_avg.w": torch.randn(shape, generator=make),
            "model.norm": torch.randn(3, generator=make).bfloat16(),
        }
        self.pieces = {
            name: Piece(self.whole[name][first : first + ROWS].clone(), first, shape)
            for name in ("model.w", "optimizer.exp_avg.w")
        }
        norm = self.whole["model.norm"].clone()
        self.pieces["model.norm"] = Piece(norm, 0, (3,), owned=self.world.rank == 0)

    def saver(self, *, asynchronous: bool = True, phase: Phase = lambda name, step: None) -> Saver:
        return Saver(
            self.shelf,
            self.pieces,
            world=self.world,
            group=self.group,
            keep=0,
            asynchronous=asynchronous,
            phase=phase,
        )

    def change(self) -> None:
        for piece in self.pieces.values():
            piece.rows.mul_(-2).add_(1)

    def names(self) -> list[str]:
        """What lies in the folder once both ranks are here."""
        dist.barrier()
        names = sorted(path.name for path in self.shelf.path.iterdir())
        dist.barrier()
        return names


def manifest(step: int) -> Manifest:
    return bare_manifest(
        Position(step=step, samples=step, updates=step, skips=0, first_loss=None, last_loss=None)
    )


def error_of(action: Callable[[], Any]) -> PithError:
    with pytest.raises(PithError) as caught:
        action()
    return caught.value


def wait_until_told(saver: Saver) -> None:
    """What a run that goes on training sees: an error that comes within some of its steps."""
    for _ in range(3000):
        saver.check()
        time.sleep(0.01)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return (tmp_path / "checkpoints").resolve()


def save_both_ways(directory: Path) -> dict[str, Tensor]:
    ranks = Ranks(directory)
    with ranks.saver(asynchronous=False) as saver:
        saver.save(manifest(1))
    with ranks.saver() as saver:
        for step in (2, 3):
            saver.save(manifest(step))
            ranks.change()  # while the bytes are on their way
    assert ranks.names() == ["step-00000001", "step-00000002", "step-00000003"]
    return ranks.whole


def test_what_is_saved_in_the_background_is_what_the_step_held(
    run_ranks: RunRanks, directory: Path
) -> None:
    whole, _ = run_ranks(2, save_both_ways, directory)
    changed = {name: tensor * -2 + 1 for name, tensor in whole.items()}
    for step, wanted in ((1, whole), (2, whole), (3, changed)):
        found = read_whole(Shelf(directory).folder(step))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), (step, name)
    now, later = (sorted(Shelf(directory).folder(k).glob("__*")) for k in (1, 2))
    assert [path.read_bytes() for path in now] == [path.read_bytes() for path in later]


def save_what_is_not_finite(directory: Path, asynchronous: bool) -> list[str]:
    ranks, told = Ranks(directory), []
    with ranks.saver(asynchronous=asynchronous) as saver:
        for name, bad in (("model.w", torch.nan), ("optimizer.exp_avg.w", -torch.inf)):
            rows = ranks.pieces[name].rows
            kept = rows[-1, -1].clone()
            if ranks.world.rank == 1:
                rows[-1, -1] = bad
            told.append(str(error_of(lambda: saver.save(manifest(1)))))
            rows[-1, -1] = kept
            assert ranks.names() == []
        saver.save(manifest(1))
    assert ranks.names() == ["step-00000001"]
    return told


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_that_are_not_finite_on_one_rank_are_committed_by_none(
    asynchronous: bool, run_ranks: RunRanks, directory: Path
) -> None:
    for told in run_ranks(2, save_what_is_not_finite, directory, asynchronous):
        for line, name in zip(told, ("model.w", "optimizer.exp_avg.w"), strict=True):
            assert line.startswith(f"{name}: values that are not finite")
    read_whole(Shelf(directory).folder(1))


def fail_behind(directory: Path, full: int) -> str:
    ranks = Ranks(directory)
    with ranks.saver() as saver:
        if ranks.world.rank == full:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, resource.RLIM_INFINITY))
        saver.save(manifest(1))
        error = error_of(lambda: wait_until_told(saver))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert isinstance(error, RunFailedError)
        assert ranks.names() == []
        saver.save(manifest(1))
    assert ranks.names() == ["step-00000001"]
    return str(error)


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_fails_in_the_background_is_raised_on_every_rank(
    full: int, run_ranks: RunRanks, directory: Path
) -> None:
    for line in run_ranks(2, fail_behind, directory, full):
        assert f"{os.strerror(errno.EFBIG)} (rank {full})" in line
        assert str(directory) in line
    read_whole(Shelf(directory).folder(1))


def fail_in_a_phase(directory: Path, where: str, failing: int) -> str:
    ranks = Ranks(directory)

    def phase(name: str, step: int) -> None:
        if (name, step, ranks.world.rank) == (where, 1, failing):
            raise RunFailedError("test.phase", what="the phase broke")

    with ranks.saver(phase=phase) as saver:
        error = error_of(lambda: (saver.save(manifest(1)), wait_until_told(saver)))
        assert "step-00000001.tmp" not in ranks.names()
        saver.save(manifest(2))
    assert "step-00000002" in ranks.names()
    return str(error)


@pytest.mark.parametrize("where", ["stage", "write", "commit"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_phase_that_fails_on_one_rank_fails_the_save_on_all(
    where: str, failing: int, run_ranks: RunRanks, directory: Path
) -> None:
    assert run_ranks(2, fail_in_a_phase, directory, where, failing) == ["the phase broke"] * 2
    assert [found.step for found in Shelf(directory).find()] == [2]


def save_again(directory: Path) -> list[bytes]:
    ranks = Ranks(directory)
    with ranks.saver(asynchronous=False) as saver:
        saver.save(manifest(1))
        ranks.change()
        assert isinstance(error_of(lambda: saver.save(manifest(1))), RequestError)
    with ranks.saver() as saver:
        saver.save(manifest(1))
        error = error_of(saver.wait)
    assert error.code == "checkpoint.exists"
    assert ranks.names() == ["step-00000001"]


def test_nothing_is_saved_over_a_step_that_is_there(run_ranks: RunRanks, directory: Path) -> None:
    run_ranks(2, save_again, directory)
    make = torch.Generator().manual_seed(11)
    found = read_whole(Shelf(directory).folder(1))
    assert torch.equal(found["model.w"], torch.randn(2 * ROWS, 4, generator=make))


def save_one_behind_the_other(directory: Path) -> tuple[list[tuple[str, int]], list[str]]:
    ranks, phases, may_write = Ranks(directory), [], threading.Event()

    def phase(name: str, step: int) -> None:
        if name == "write":
            may_write.wait(30)
        phases.append((name, step))

    with ranks.saver(phase=phase) as saver:
        saver.save(manifest(1))
        assert ("write", 1) not in phases  # it returned before the bytes were written
        assert saver.check() == ()
        threading.Timer(0.3, may_write.set).start()  # time enough to be overtaken
        saver.save(manifest(2))
    return phases, ranks.names()


def test_saves_wait_for_the_one_before_and_leaving_waits_for_the_last(
    run_ranks: RunRanks, directory: Path
) -> None:
    wanted = [(name, k) for k in (1, 2) for name in ("stage", "write", "commit", "retire")]
    for phases, names in run_ranks(2, save_one_behind_the_other, directory):
        assert phases == wanted
        assert names == ["step-00000001", "step-00000002"]


def leave_in_error(directory: Path) -> tuple[float, list[str]]:
    ranks, released = Ranks(directory), threading.Event()
    saver = ranks.saver(phase=lambda name, step: name == "write" and released.wait(30))
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), saver:  # noqa: PT012
        saver.save(manifest(1))
        raise ZeroDivisionError
    seconds, names = time.monotonic() - start, ranks.names()
    released.set()
    saver.wait()
    return seconds, names


def test_an_error_leaves_without_waiting_for_a_save_that_is_stuck(
    run_ranks: RunRanks, directory: Path
) -> None:
    for seconds, names in run_ranks(2, leave_in_error, directory, seconds=60):
        assert seconds < 5
        assert names == []


def test_one_process_without_a_group_saves_too(directory: Path) -> None:
    world = World.joined(torch.device("cpu"))
    piece = Piece(torch.tensor(2.5), 0, ())
    how: dict[str, Any] = {"world": world, "group": None, "keep": 1, "asynchronous": True}
    with Saver(Shelf(directory), {"scale": piece}, **how) as saver:
        saver.save(manifest(1))
        piece.rows.fill_(7.5)
        saver.save(manifest(2))
    assert os.listdir(directory) == ["step-00000002"]
    assert read_whole(directory / "step-00000002") == {"scale": 7.5}
