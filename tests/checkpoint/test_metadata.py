"""A crafted .metadata runs nothing and is refused in one line."""

import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

from pith.checkpoint.manifest import Manifest, TensorEntry
from pith.checkpoint.metadata import METADATA, check_against, read_metadata, tensors_of
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import write
from pith.errors import RequestError
from tests.checkpoint.by_hand import manifest_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write({"w": Piece(torch.ones(4, 2), 0, (4, 2))}, tmp_path, group=None)
    return tmp_path


READ = """
import sys
from pathlib import Path
from pith.checkpoint.metadata import read_metadata
from pith.errors import RequestError
for folder in map(Path, sys.argv[1:]):
    try:
        read_metadata(folder)
    except RequestError as error:
        print(f"{folder.name}: {error.found}", flush=True)
"""


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


class _EarlyPython(pickle.Pickler):
    """Writes members of an enum as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_members_of_an_enum_are_read_as_early_releases_of_python_write_them(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    written = io.BytesIO()
    _EarlyPython(written, 4).dump(metadata)
    assert b"getattr" in written.getvalue()
    (folder / METADATA).write_bytes(written.getvalue())

    assert tensors_of(read_metadata(folder)) == tensors_of(metadata)


def test_getattr_is_as_inert_as_the_rest(folder: Path) -> None:
    for payload in (Call(getattr, Metadata, "__class__"), Call(getattr, {}, "__class__")):
        (folder / METADATA).write_bytes(pickle.dumps(payload, 4))
        with pytest.raises(RequestError, match="getattr in place of Metadata"):
            read_metadata(folder)


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


def through_the_memo(get: Callable[[int], bytes], levels: int, each: int) -> tuple[bytes, bytes]:
    chain = (get(k) + b"\x85" * each + b"\x94" for k in range(levels))
    return b"](N\x94" + b"".join(chain) + b"e", b"j" + levels.to_bytes(4, "little")


HEAVY = {  # what comes before a dict, and the key in it
    "nested": (b"", b"N" + b"\x85" * 300_000),
    "marked": (b"", b"(" * 300_000 + b"N" + b"t" * 300_000),
    "in twos": (b"", b"N" * 300_000 + b"N" + b"\x86" * 300_000),
    "in threes": (b"", b"N" * 600_000 + b"N" + b"\x87" * 300_000),
    "in pieces": through_the_memo(lambda k: b"h" + bytes([k]), 255, 2000),
    "of old parts": through_the_memo(lambda k: b"j" + k.to_bytes(4, "little"), 300_000, 1),
    "in a tuple": (b"", b"N(N" + b"\x85" * 300_000 + b"t\x86"),
    "wide": (b"(" + b"N" * 99999 + b"t\x94", b"(" + b"h\x00" * 99999 + b"t"),
    "doubled": (b"N\x94", b"h\x00" + b"".join(b"\x94h%c\x86" % k for k in range(1, 60))),
}


def test_a_key_that_hashing_would_not_survive_is_refused(tmp_path: Path) -> None:
    for kind, (before, key) in HEAVY.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / METADATA).write_bytes(b"\x80\x04" + before + b"}" + key + b"Ns.")
    read = [sys.executable, "-c", READ, *(tmp_path / kind for kind in HEAVY)]
    done = subprocess.run(read, check=False, capture_output=True, text=True, timeout=60)
    refused = dict(line.split(": ") for line in done.stdout.splitlines())
    assert refused == dict.fromkeys(HEAVY, "a tuple of more than 100 parts"), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("content", [b"\x85.", b"(\x85.", b"N(\x86.", b"h\x00.", b"\x94.", b"t."])
def test_a_pickle_that_takes_more_than_it_holds_is_refused(folder: Path, content: bytes) -> None:
    (folder / METADATA).write_bytes(b"\x80\x04" + content)
    with pytest.raises(RequestError, match="takes more than it holds"):
        read_metadata(folder)


def manifest_like(folder: Path) -> Manifest:
    manifest = manifest_of(folder, step=1)
    return manifest.model_copy(update={"tensors": tensors_of(read_metadata(folder))})


def test_what_metadata_and_manifest_tell_apart_is_named(folder: Path) -> None:
    metadata, manifest = read_metadata(folder), manifest_like(folder)
    check_against(metadata, manifest, folder)
    (file,) = (entry for entry in manifest.files if entry.name != METADATA)
    named = {entry.name: entry for entry in manifest.files}
    for tensors, files, wanted in (
        ({}, named, ["w: found shape=(4, 2) dtype='float32', wanted nothing"]),
        ({"v": (4, 2)}, named, ["v: found nothing, wanted shape=(4, 2)", "w: found shape"]),
        ({"w": (2, 4)}, named, ["w: found shape=(4, 2) dtype='float32', wanted shape=(2, 4)"]),
        ({"w": "int32"}, named, ["dtype='float32', wanted shape=(4, 2) dtype='int32'"]),
        ({"w": (4, 2)}, {METADATA: file}, [f"{file.name}: found a file in use"]),
        ({"w": (4, 2)}, {file.name: file}, [f"{METADATA}: found a file in use"]),
    ):
        told = {
            name: TensorEntry(shape=(4, 2), dtype=what)
            if isinstance(what, str)
            else TensorEntry(shape=what, dtype="float32")
            for name, what in tensors.items()
        }
        kept = tuple(entry for entry in manifest.files if entry.name in files)
        other = manifest.model_copy(update={"tensors": told, "files": kept})
        with pytest.raises(RequestError, match=f"{len(wanted)} differences") as caught:
            check_against(metadata, other, folder)
        for fault, word in zip(caught.value.faults, wanted, strict=True):
            assert word in str(fault)


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
