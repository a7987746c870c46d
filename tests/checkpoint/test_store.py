"""Pieces saved by any ranks are loaded by any others, by us and by torch itself."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from pith.checkpoint.manifest import MANIFEST, Manifest, Position, describe, encode
from pith.checkpoint.metadata import read_metadata, tensors_of
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import load, read_whole, write
from pith.errors import RequestError, RunFailedError
from tests.conftest import RunRanks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def whole() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(3)
    return {
        "uneven": torch.randn(7, 3, generator=make),
        "experts": torch.randn(4, 5, 2, generator=make, dtype=torch.float64),
        "norm": torch.randn(9, generator=make).bfloat16(),
        "view": torch.randn(6, 8, generator=make).T,
        "few": torch.randn(2, 4, generator=make),
    }


def cut(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Piece]:
    """Chunks of ceil(rows / ranks) rows: the last ranks may have none."""
    pieces = {}
    for name, tensor in tensors.items():
        each = -(-len(tensor) // num_ranks)
        first, end = (min(k * each, len(tensor)) for k in (rank, rank + 1))
        pieces[name] = Piece(tensor[first:end], first, tuple(tensor.shape))
    return pieces


def emptied(pieces: dict[str, Piece]) -> dict[str, Piece]:
    """The same pieces of NaN, as columns of something wider."""
    return {
        name: Piece(
            torch.full((*p.rows.shape, 2), torch.nan, dtype=p.rows.dtype)[..., 0],
            p.first_row,
            p.shape,
        )
        for name, p in pieces.items()
    }


def assert_loaded(folder: Path, rank: int, num_ranks: int) -> None:
    wanted = cut(whole(), rank, num_ranks)
    pieces = emptied(wanted)
    load(pieces, folder)
    for name, piece in pieces.items():
        assert torch.equal(piece.rows, wanted[name].rows), name


def save_on_four(folder: Path) -> None:
    rank = dist.get_rank()
    pieces = cut(whole(), rank, 4)
    if rank:  # a second copy of rank 0's rows and more
        rows = whole()["uneven"][: rank + 2]
        pieces["uneven"] = Piece(rows, 0, (7, 3), owned=False)
    else:
        pieces["uneven"] = Piece(whole()["uneven"], 0, (7, 3))
    write(pieces, folder, group=dist.group.WORLD)
    assert_loaded(folder, rank, 4)


def test_what_four_ranks_save_any_number_of_ranks_and_torch_itself_load(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    run_ranks(4, save_on_four, folder)
    for num_ranks in (1, 2, 3):
        for rank in range(num_ranks):
            assert_loaded(folder, rank, num_ranks)
    found = {name: torch.zeros_like(t).contiguous() for name, t in whole().items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole().items())


def test_what_torch_saves_is_loaded(tmp_path: Path) -> None:
    dcp.save(whole(), checkpoint_id=tmp_path, no_dist=True)
    for rank in range(3):
        assert_loaded(tmp_path, rank, 3)


def test_missing_names_other_shapes_and_other_types_are_refused_at_once(tmp_path: Path) -> None:
    write(cut(whole(), 0, 1), tmp_path, group=None)
    pieces = {
        "absent": Piece(torch.zeros(2), 0, (2,)),
        "few": Piece(torch.zeros(3, 4), 0, (3, 4)),
        "norm": Piece(torch.zeros(9), 0, (9,)),
        "uneven": Piece(torch.zeros(7, 3), 0, (7, 3)),
    }
    with pytest.raises(RequestError) as caught:
        load(pieces, tmp_path)
    assert [fault.where for fault in caught.value.faults] == ["absent", "few", "norm"]
    assert not pieces["uneven"].rows.any()  # nothing was loaded


@pytest.mark.parametrize(("first", "word"), [(1, "no rows 0 to 1"), (0, "no rows 4 to 5")])
def test_rows_that_no_rank_owns_are_refused(first: int, word: str, tmp_path: Path) -> None:
    pieces = {"w": Piece(torch.zeros(4, 2), first, (5, 2)), "v": Piece(torch.ones(2), 0, (2,))}
    with pytest.raises(RunFailedError, match=word) as caught:
        write(pieces, tmp_path, group=None)
    assert [fault.where for fault in caught.value.faults] == ["w"]
    with pytest.raises(RunFailedError, match="no rows 0 to 2"):
        write({"v": Piece(torch.ones(2), 0, (2,), owned=False)}, tmp_path, group=None)


def save_twice(folder: Path) -> str:
    with pytest.raises(RunFailedError) as caught:
        write({"w": Piece(torch.zeros(3), 0, (3,))}, folder, group=dist.group.WORLD)
    return str(caught.value)


def fill_the_disk(folder: Path) -> str:
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    pieces = {"w": Piece(torch.zeros(1 << 16), dist.get_rank() << 16, (1 << 17,))}
    with pytest.raises(RunFailedError) as caught:
        write(pieces, folder, group=dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert caught.value.code == "checkpoint.write_failed"
    return str(caught.value)


def test_what_fails_on_one_rank_fails_on_all_with_path_and_cause(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    full, double = (tmp_path / "a").resolve(), tmp_path / "b"
    full.mkdir()
    double.mkdir()
    for line in run_ranks(2, fill_the_disk, full):
        assert str(full) in line
        assert f"{os.strerror(27)} (rank 1)" in line
    assert all("rows 0 to 3 twice" in line for line in run_ranks(2, save_twice, double))


def test_a_checkpoint_is_read_whole_or_every_damaged_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    write(cut(whole(), 0, 1), folder, group=None)
    manifest = Manifest(
        run="r",
        position=Position(step=1, samples=1, updates=1, skips=0, first_loss=None, last_loss=None),
        recipe={},
        layout={},
        corpus="",
        tokenizer="",
        versions={},
        tensors=tensors_of(read_metadata(folder)),
        files=tuple(describe(path) for path in sorted(folder.iterdir())),
    )
    (folder / MANIFEST).write_bytes(encode(manifest))
    found = read_whole(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole().items())
    data = folder / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(RequestError, match=r"__0_0\.distcp") as caught:
        read_whole(folder)
    assert caught.value.code == "checkpoint.damaged"
