"""Reads .metadata of torch.distributed.checkpoint without trusting it.

The file is a pickle. No class or function of torch is reachable from it: each allowed global stands
for an inert record, and torch's own metadata is built from the records once they are checked.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pith.checkpoint.manifest import Manifest, TensorEntry
from pith.checkpoint.pieces import num_rows, span_of, uncovered
from pith.errors import Fault, RequestError, first_of

METADATA = ".metadata"
_LARGEST_BYTES = 1 << 28  # about a million chunks

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "getattr"),  # of an enum, as Python 3.11.2 writes it; as inert as the rest
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
# What pickle writes for these records. Others can claim memory that the file does not have.
_WRITTEN = re.compile(
    "PROTO|FRAME|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|NEWOBJ|REDUCE|"
    "BUILD|(STACK_)?GLOBAL|(SHORT_)?BIN(UNICODE|BYTES)|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|"
    "MEMOIZE|(LONG_)?BINGET"
)
_OPCODES = {
    ord(opcode.code): (opcode.name, opcode.arg.n if opcode.arg else 0)
    for opcode in pickletools.opcodes
    if _WRITTEN.fullmatch(opcode.name)
}
_LENGTH_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_LENGTH_BYTES[pickletools.TAKEN_FROM_ARGUMENT4U] = 4
_GETS = {"BINGET", "LONG_BINGET"}
_TUPLES = {"EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"}
_TO_MARK = {"TUPLE", "APPENDS", "SETITEMS"}
# How many objects an opcode that leaves one takes from the stack, besides those above the mark.
_TAKEN = {
    opcode.name: sum(
        kind not in (pickletools.markobject, pickletools.stackslice) for kind in opcode.stack_before
    )
    for opcode in pickletools.opcodes
    if opcode.stack_after and opcode.name not in _GETS | {"MARK", "MEMOIZE"}
}
_HEAVIEST_TUPLE = 100  # a shape has no more than 64 numbers


class _Record:
    """What the file says of one object: the arguments of its making, and its state."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:  # without it, a file could set a class's attributes
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _RECORDS:
            raise _MalformedError(f"the global {module}.{name}"[:200])
        return self._kinds.setdefault(name, type(name, (_Record,), {"__slots__": ()}))


class _MalformedError(Exception):
    """What was found in place of metadata."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one chunk lies."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(folder: Path) -> Metadata:
    """What the .metadata of a checkpoint folder says, checked against the files' sizes.

    Raises RequestError, with every fault, unless it holds row chunks that are whole tensors.
    """
    path = folder / METADATA
    faults: list[Fault] = []
    try:
        metadata = _metadata(_unpickled(path), folder, faults)
    except _MalformedError as error:
        raise _refused(path, str(error)) from None
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    except Exception as error:  # what bytes that are no pickle lead to has no narrower type
        raise _refused(path, f"{type(error).__name__}: {str(error)[:200]}") from error
    if faults:
        raise _refused(path, first_of(faults), tuple(faults))
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorEntry]:
    """Shape and type of every whole tensor, by name."""
    return {
        name: TensorEntry(
            shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch.")
        )
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


def check_against(metadata: Metadata, manifest: Manifest, folder: Path) -> None:
    """Raises RequestError with every tensor and file in which .metadata and manifest differ."""
    path = folder / METADATA
    found, wanted = tensors_of(metadata), manifest.tensors
    faults = [
        Fault(name, str(found.get(name, "nothing")), str(wanted.get(name, "nothing")))
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    listed = {entry.name for entry in manifest.files}
    used = {METADATA, *(stored.relative_path for stored in metadata.storage_data.values())}
    faults += [Fault(name, "a file in use", "in the manifest") for name in sorted(used - listed)]
    if faults:
        raise _refused(path, f"{len(faults)} differences to the manifest", tuple(faults))


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise _MalformedError(f"more than {_LARGEST_BYTES} bytes")
    try:
        _require_light_tuples(_opcodes(content))
    except IndexError:
        raise _MalformedError("a pickle that takes more than it holds") from None
    return _Unpickler(content).load()


def _opcodes(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and argument of each opcode. Raises _MalformedError for one that pickle does not write.

    Only the arguments of BINGET and LONG_BINGET are told, the others are empty.
    """
    at = 0
    while at < len(content):
        code = content[at]
        if code not in _OPCODES:
            raise _MalformedError(f"opcode {code} at byte {at}")
        name, size = _OPCODES[code]
        at += 1
        if name == "GLOBAL":  # pickle no longer writes it
            module, _, rest = content[at : at + 400].partition(b"\n")
            found = b".".join((module, rest.partition(b"\n")[0])).decode("ascii", "replace")
            raise _MalformedError(f"the global {found}"[:200])
        if size in _LENGTH_BYTES:
            width = _LENGTH_BYTES[size]
            size = width + int.from_bytes(content[at : at + width], "little")
        yield name, content[at : at + size] if name in _GETS else b""
        at += size
        if name == "STOP":
            break
    if at != len(content):
        raise _MalformedError("cut short, or followed by other bytes")


def _require_light_tuples(opcodes: Iterable[tuple[str, bytes]]) -> None:
    """Follow what lies on the pickle's stack: a tuple weighs what it holds and one, all else one.

    C hashes the tuple in a dict's key by a recursion without limit, and visits all it holds.
    """
    stack: list[int] = []
    below: list[list[int]] = []  # the stacks under each mark
    memo: list[int] = []
    for name, argument in opcodes:
        if name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in _GETS:
            stack.append(memo[int.from_bytes(argument, "little")])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in _TAKEN:
            weight = 1
            if name in _TO_MARK:
                weight, stack = weight + sum(stack), below.pop()
            for _ in range(_TAKEN[name]):
                weight += stack.pop()
            stack.append(weight if name in _TUPLES else 1)
            if stack[-1] > _HEAVIEST_TUPLE:
                raise _MalformedError(f"a tuple of more than {_HEAVIEST_TUPLE} parts")


def _metadata(root: Any, folder: Path, faults: list[Fault]) -> Metadata:
    fields = _fields(root, "Metadata", ("state_dict_metadata", "storage_data"))
    tensors: dict[str, Any] = {}
    for name, entry in _of(fields["state_dict_metadata"], dict).items():
        tensors[_of(name, str)] = _tensor(name, entry, faults)
    sizes: dict[str, int] = {}
    storage = {}
    for index, info in _of(fields["storage_data"], dict).items():
        key = _index(index)
        storage[key] = _stored(key.fqn, info, folder, sizes, faults)
    wanted = {MetadataIndex(n, c.offsets) for n, t in tensors.items() if t for c in t.chunks}
    for key in wanted ^ storage.keys():
        if tensors.get(key.fqn, True):
            found = f"{'no' if key in wanted else 'an'} entry for the chunk at {key.offset}"
            faults.append(Fault(key.fqn, found, "one for each chunk"))
    return Metadata(tensors, storage_data=storage)


def _tensor(name: str, entry: Any, faults: list[Fault]) -> TensorStorageMetadata | None:
    if type(entry).__name__ == "BytesStorageMetadata":
        faults.append(Fault(name, "an entry of bytes, which loading would unpickle", "a tensor"))
        return None
    fields = _fields(entry, "TensorStorageMetadata", ("properties", "size", "chunks"))
    dtype = _of(_of(_record(fields["properties"], "TensorProperties").state, tuple)[0], torch.dtype)
    size = _size(fields["size"])
    chunks = []
    for chunk in _of(fields["chunks"], list):
        parts = _fields(chunk, "ChunkStorageMetadata", ("offsets", "sizes"))
        chunks.append(ChunkStorageMetadata(_size(parts["offsets"]), _size(parts["sizes"])))
    for chunk in chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if len(offsets) != len(size) or any(offsets[1:]) or sizes[1:] != size[1:]:
            faults.append(Fault(name, f"a chunk {list(sizes)} at {list(offsets)}", "whole rows"))
            return None
    if wrong := uncovered(map(span_of, chunks), num_rows(tuple(size))):
        faults.append(Fault(name, wrong, f"each of {num_rows(tuple(size))} once"))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _stored(
    name: str, info: Any, folder: Path, sizes: dict[str, int], faults: list[Fault]
) -> _Stored:
    fields = _fields(info, "_StorageInfo", ("relative_path", "offset", "length"))
    file, offset, length = _of(fields["relative_path"], str), fields["offset"], fields["length"]
    if not file.isprintable() or "/" in file or "\\" in file or file in ("", ".", ".."):
        faults.append(Fault(name, f"file {file!r:.100}", "a plain file name"))
    elif fields.get("transform_descriptors"):
        faults.append(Fault(name, "transformed bytes", "plain ones"))
    else:
        if file not in sizes:
            path = folder / file
            sizes[file] = path.stat().st_size if path.is_file() else -1
        if _count(offset) + _count(length) > sizes[file]:
            found = f"{length} bytes at {offset} of {file}"
            held = f"its {sizes[file]} bytes" if sizes[file] >= 0 else "a file that exists"
            faults.append(Fault(name, found, f"a place inside {held}"))
    return _Stored(file, offset, length)


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex", ("fqn",))
    offset = fields.get("offset")
    return MetadataIndex(_of(fields["fqn"], str), None if offset is None else _size(offset))


def _record(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise _MalformedError(f"{type(value).__name__} in place of {kind}")
    return value


def _fields(value: Any, kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = _of(_record(value, kind).state, dict)
    if missing := [name for name in names if name not in fields]:
        raise _MalformedError(f"{kind} without {missing[0]}")
    return fields


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _MalformedError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _size(value: Any) -> torch.Size:
    args = _record(value, "Size").args
    return torch.Size([_count(number) for number in _of(args[0], tuple)] if args else [])


def _count(value: Any) -> int:
    if _of(value, int) < 0 or value >= 1 << 62:
        raise _MalformedError("a size or place that is negative or too large")
    return int(value)


def _refused(path: Path, found: str, faults: tuple[Fault, ...] = ()) -> RequestError:
    return RequestError(
        "checkpoint.metadata",
        what="this does not describe a checkpoint of tensors; nothing of it was loaded",
        found=found,
        wanted="whole tensors in rows, as pith saves them",
        where=str(path),
        next_step=f"pith checkpoint verify {path.parent}",
        faults=faults,
    )
