"""A crafted .metadata runs nothing and is refused in one line."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

from pith.checkpoint.metadata import METADATA, read_metadata
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import write
from pith.errors import RequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write({"w": Piece(torch.ones(4, 2), 0, (4, 2))}, tmp_path, group=None)
    return tmp_path


class Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_crafted_pickle_runs_nothing(folder: Path, protocol: int) -> None:
    canary = folder / "canary"
    touch = f"open({str(canary)!r}, 'w')"
    loads = pickle.dumps(Call(eval, touch))
    for payload in (
        Call(os.system, f"touch {canary}"),
        Call(eval, touch),
        [{"x": Metadata({"w": Call(exec, touch)})}],
        Call(torch.load, str(canary)),
        Call(pickle.loads, loads),
    ):
        (folder / METADATA).write_bytes(pickle.dumps(payload, protocol))
        word = "the global" if protocol >= 4 else "(the global|opcode)"
        with pytest.raises(RequestError, match=f"found {word}") as caught:
            read_metadata(folder)
        assert str(folder / METADATA) in str(caught.value)
        assert not canary.exists()


@pytest.mark.parametrize("name", ["Size.__class__", "serialization.os.system", "load", "Tensor"])
def test_what_hangs_on_an_allowed_global_is_refused(folder: Path, name: str) -> None:
    short = bytes([0x8C, 5]) + b"torch" + bytes([0x8C, len(name)]) + name.encode()
    (folder / METADATA).write_bytes(b"\x80\x04" + short + b"\x93\x8c\x02ls\x85R.")
    with pytest.raises(RequestError, match=f"the global torch.{name}"):
        read_metadata(folder)


def test_bytes_that_are_no_metadata_are_refused(folder: Path) -> None:
    path = folder / METADATA
    real = path.read_bytes()
    draw = random.Random(5)
    crafted = [draw.randbytes(draw.randrange(200)) for _ in range(300)]
    crafted += [real[:size] for size in range(len(real))] + [real + b"."]
    crafted += [
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x96" + b"\xff" * 7 + b"\x0f.",
        b"\x80\x04N.",
    ]
    for content in crafted:
        path.write_bytes(content)
        with pytest.raises(RequestError):
            read_metadata(folder)
    for at in range(len(real)):  # whatever a flipped byte means, it raises nothing else
        path.write_bytes(real[:at] + bytes([real[at] ^ (1 << draw.randrange(8))]) + real[at + 1 :])
        try:
            read_metadata(folder)
        except RequestError:
            continue
    path.unlink()
    with pytest.raises(RequestError, match="No such file"):
        read_metadata(folder)


def put(**fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        (info,) = metadata.storage_data.values()
        for name, value in fields.items():
            setattr(info, name, value)

    return change


def chunks(*spans: tuple[int, int], column: int = 0) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks[:] = [
            ChunkStorageMetadata(torch.Size([first, column]), torch.Size([rows, 2]))
            for first, rows in spans
        ]

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (put(relative_path="../x"), "plain file name"),
        (put(relative_path="/etc/passwd"), "plain file name"),
        (put(relative_path="a/b"), "plain file name"),
        (put(relative_path=".."), "plain file name"),
        (put(relative_path="absent"), "a file that exists"),
        (put(offset=1), "a place inside"),
        (put(offset=1 << 70), "too large"),
        (put(length=-1), "negative"),
        (put(transform_descriptors=["zstd"]), "transformed"),
        (chunks((0, 3), (2, 2)), "rows 2 to 3 twice"),
        (chunks((0, 1), (2, 2)), "no rows 1 to 2"),
        (chunks((0, 3)), "no rows 3 to 4"),
        (chunks((0, 4), column=1), "whole rows"),
        (chunks((0, -4)), "negative"),
        (lambda m: m.state_dict_metadata.update(b=BytesStorageMetadata()), "an entry of bytes"),
        (lambda m: m.storage_data.clear(), "no entry for the chunk"),
        (lambda m: m.state_dict_metadata.clear(), "an entry for the chunk"),
        (lambda m: setattr(m, "state_dict_metadata", [1]), "in place of dict"),
    ],
)
def test_metadata_that_says_something_impossible_is_refused(
    folder: Path, change: Callable[[Metadata], None], word: str
) -> None:
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(metadata))
    read_metadata(folder)
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(RequestError, match=word):
        read_metadata(folder)
