"""Pieces saved by any ranks are loaded by any others, by us and by torch itself."""

import errno
import os
import pickle
import random
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from pith.checkpoint.manifest import MANIFEST, Manifest, Position, describe, encode
from pith.checkpoint.metadata import METADATA, read_metadata, tensors_of
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


def fill_the_disk(folder: Path, full: int, pieces_of: Callable[[int], dict[str, Piece]]) -> str:
    rank = dist.get_rank()
    if rank == full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    with pytest.raises(RunFailedError) as caught:
        write(pieces_of(rank), folder, group=dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert caught.value.code == "checkpoint.write_failed"
    return str(caught.value)


def much_data(rank: int) -> dict[str, Piece]:
    return {"w": Piece(torch.zeros(1 << 16), rank << 16, (1 << 17,))}


def many_names(rank: int) -> dict[str, Piece]:
    """All on rank 1: rank 0 writes no data, only .metadata, which is larger than 64 KiB."""
    return {f"{k}": Piece(torch.zeros(rank), 0, (1,)) for k in range(700)}


def test_what_fails_on_one_rank_fails_on_all_with_path_and_cause(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    full, untold, double = (tmp_path.resolve() / name for name in "abc")
    for folder in (full, untold, double):
        folder.mkdir()
    for folder, rank, pieces_of in ((full, 1, much_data), (untold, 0, many_names)):
        for line in run_ranks(2, fill_the_disk, folder, rank, pieces_of):
            assert str(folder) in line
            assert f"{os.strerror(errno.EFBIG)} (rank {rank})" in line
    assert (untold / "__1_0.distcp").stat().st_size > 1 << 16
    assert not (untold / METADATA).exists()
    assert all("rows 0 to 3 twice" in line for line in run_ranks(2, save_twice, double))


@pytest.mark.parametrize(("shape", "dtype"), [((4, 2), torch.int32), ((2, 4), torch.float32)])
def test_stored_tensors_that_contradict_metadata_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    write({"w": Piece(torch.ones(4, 2), 0, (4, 2))}, tmp_path, group=None)
    path = tmp_path / METADATA
    metadata = pickle.loads(path.read_bytes())
    size, origin = torch.Size(shape), torch.Size([0, 0])
    metadata.state_dict_metadata["w"] = TensorStorageMetadata(
        TensorProperties(dtype), size, [ChunkStorageMetadata(origin, size)]
    )
    path.write_bytes(pickle.dumps(metadata))
    rows = torch.zeros(shape, dtype=dtype)
    found = re.escape(f"w: torch.float32 [4, 2], wanted {dtype} {list(shape)}")
    with pytest.raises(RequestError, match=found) as caught:
        load({"w": Piece(rows, 0, shape)}, tmp_path)
    assert caught.value.code == "checkpoint.damaged"
    assert not rows.any()


@pytest.mark.parametrize(
    "other",
    [[1.0], torch.ones(4, 2).to_sparse(), torch.ones(4, 2, device="meta"), torch.ones(1, 2)],
)
def test_what_is_stored_in_place_of_a_tensor_is_refused(other: Any, tmp_path: Path) -> None:
    write({"w": Piece(torch.ones(4, 2), 0, (4, 2))}, tmp_path, group=None)
    stored = tmp_path / "__0_0.distcp"
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    (info,) = metadata.storage_data.values()
    torch.save(other, stored)
    info.length = stored.stat().st_size
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(RequestError, match=r"found w: ") as caught:
        load({"w": Piece(torch.zeros(4, 2), 0, (4, 2))}, tmp_path)
    assert caught.value.code == "checkpoint.damaged"


def load_flipped(folder: Path) -> list[str]:
    """What loading makes of one flipped bit, in each of 200 places, then of all of them."""
    path = folder / "__0_0.distcp"
    intact, draw = path.read_bytes(), random.Random(7)
    tensor = whole()["few"]
    values = intact.index(tensor.numpy().tobytes())
    inside = [values + draw.randrange(tensor.numel() * 4) for _ in range(40)]
    places = [*inside, *(draw.randrange(len(intact)) for _ in range(160))]
    outcomes = []
    for flipped in [*([at] for at in places), places]:
        content = bytearray(intact)
        for at in flipped:
            content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        pieces = emptied({"few": Piece(tensor, 0, (2, 4))})
        try:
            load(pieces, folder)
        except RequestError as error:
            outcomes.append(error.code)
        else:
            same = pieces["few"].rows.contiguous().numpy().tobytes() == tensor.numpy().tobytes()
            outcomes.append("same" if same else "loaded")
    return outcomes


def test_a_flipped_bit_is_refused_or_loads_and_never_crashes(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    write({"few": Piece(whole()["few"], 0, (2, 4))}, folder, group=None)
    (outcomes,) = run_ranks(1, load_flipped, folder)
    assert outcomes[:40] == ["loaded"] * 40  # what only checksums see
    assert outcomes[40:200].count("checkpoint.damaged") > 20
    assert outcomes[200] == "checkpoint.damaged"


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
