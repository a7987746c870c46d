"""What a checkpoint folder says of itself: manifest.json, and whether the folder keeps its word.

    .metadata, __0_0.distcp ...   tensors only, as torch.distributed.checkpoint writes them
    manifest.json                 everything else, and size and sha256 of each of those files

The manifest is written last. Its own last entry is the sha256 of all its bytes before that entry,
so that no byte of it can change unseen.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, FiniteFloat, JsonValue, NonNegativeInt, PositiveInt

from pith.disk import sha256_of
from pith.errors import Fault, RequestError

MANIFEST = "manifest.json"
_SEAL = b'"sha256": "'
_SEAL_END = b'"\n}\n'
_HASHING_THREADS = 8

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(_Frozen):
    """Shape and type of one whole tensor, whatever the layout that saved it."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str = Field(pattern=r"^(bool|[a-z]+(8|16|32|64|128)(_[a-z0-9]+)?)$")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.num_elements * (int(bits.group()) // 8 if bits else 1)


class FileEntry(_Frozen):
    """One file of the folder; its name can mean nothing outside the folder."""

    name: str = Field(pattern=r"^\.?[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)
    size_bytes: NonNegativeInt
    sha256: Sha256


class Position(_Frozen):
    """How far the run is."""

    step: NonNegativeInt  # steps taken
    samples: NonNegativeInt  # sequences of the sample order that were read
    updates: NonNegativeInt  # steps that moved weights
    skips: NonNegativeInt  # consecutive steps up to here that moved none
    first_loss: FiniteFloat | None
    last_loss: FiniteFloat | None


class Manifest(_Frozen):
    """Everything of a checkpoint that is no tensor."""

    format: Literal["pith/checkpoint/1"] = "pith/checkpoint/1"
    run: str = Field(min_length=1)  # id of the run that saved it
    position: Position
    recipe: dict[str, JsonValue]
    layout: dict[str, PositiveInt]  # pp, dp, cp, ep
    corpus: str  # fingerprint
    tokenizer: str
    versions: dict[str, str]
    tensors: dict[str, TensorEntry]
    files: tuple[FileEntry, ...]

    @pydantic.model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [entry.name for entry in self.files]
        if MANIFEST in names or len(set(names)) < len(names):
            raise ValueError("files names a file twice, or the manifest itself")
        return self

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(entry.size_bytes for entry in self.files)


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: one line for each entry, the last one the seal."""
    entries = manifest.model_dump(mode="json").items()
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in entries)
    body = ("{\n" + ",\n".join(lines) + ",\n").encode()
    return body + _SEAL + _digest(body) + _SEAL_END


def decode(content: bytes) -> Manifest:
    """The manifest in these bytes. Raises ValueError, in one line, for any that are not whole."""
    body, _, seal = content.rpartition(_SEAL)
    if seal != _digest(body) + _SEAL_END:
        raise ValueError("cut short or changed: its own sha256 does not hold")
    text = body.rstrip(b",\n") + b"\n}"
    try:
        manifest = Manifest.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ValueError(f"{field}: {first['msg']}, not {first['input']!r:.80}") from None
    json.dumps(json.loads(text), allow_nan=False)  # Python's own JSON lets NaN and 1e999 pass
    if not manifest.files:
        raise ValueError("files: it lists none")
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; its files are not looked at.

    Raises RequestError, with found and wanted, when it is missing, unreadable or damaged.
    """
    path = folder / MANIFEST
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        found = f"no {MANIFEST}" if folder.is_dir() else "no such folder"
    except OSError as error:
        found = error.strerror or str(error)
    except ValueError as error:  # a NUL in the path is one too
        found = str(error)
    raise RequestError(
        "checkpoint.manifest",
        what="this is no complete checkpoint",
        found=found,
        wanted=f"a whole {MANIFEST}, which is written last",
        where=str(path),
        next_step=f"pith checkpoint list {folder.parent}",
    )


def describe(path: Path) -> FileEntry:
    """Size and checksum of a file, read back from disk."""
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path))


def faults(
    folder: Path,
    manifest: Manifest,
    *,
    checksums: bool,
    names: Collection[str] | None = None,
    strangers: bool = False,
) -> list[Fault]:
    """Where the files of `folder` are not those of its manifest; all of them, or only `names`.

    Sizes are always compared, contents with `checksums`. With `strangers`, what the manifest does
    not list is a fault too. Raises RequestError when the folder cannot be listed.
    """
    entries = [entry for entry in manifest.files if names is None or entry.name in names]
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda entry: _fault(folder, entry, checksums=checksums), entries)
        wrong = [fault for fault in found if fault]
    return wrong + (_strangers(folder, manifest) if strangers else [])


def _fault(folder: Path, entry: FileEntry, *, checksums: bool) -> Fault | None:
    path = folder / entry.name
    wanted = f"{entry.size_bytes} bytes"
    try:
        target = Path(os.path.realpath(path))
        if path.is_symlink() and target.parent != Path(os.path.realpath(folder)):
            return Fault(str(path), f"a link to {target}", "a file inside the folder")
        if not path.is_file():
            return Fault(
                str(path), "no such file" if not path.exists() else "no plain file", wanted
            )
        size = path.stat().st_size
        if size != entry.size_bytes:
            return Fault(str(path), f"{size} bytes", wanted)
        digest = sha256_of(path) if checksums else entry.sha256
    except OSError as error:
        return Fault(str(path), error.strerror or str(error), wanted)
    if digest != entry.sha256:
        return Fault(str(path), f"sha256 {digest[:16]}", f"sha256 {entry.sha256[:16]}")
    return None


def _strangers(folder: Path, manifest: Manifest) -> list[Fault]:
    known = {MANIFEST, *(entry.name for entry in manifest.files)}
    try:
        names = sorted(set(os.listdir(folder)) - known)
    except (OSError, ValueError) as error:
        raise RequestError(
            "checkpoint.folder",
            what="the checkpoint cannot be listed",
            found=getattr(error, "strerror", None) or str(error),
            wanted="a folder that can be read",
            where=str(folder),
        ) from error
    return [
        Fault(str(folder / name), "a file that is not part of the checkpoint", "none")
        for name in names
    ]


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
