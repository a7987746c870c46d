"""A tokenized corpus on disk: its files, its manifest, and how they are written.

    manifest.json      what is here: tokenizer, vocabulary, counts, size and sha256 of each file
    tokens-00000.bin   token ids, little-endian uint16 or uint32; each document ends with the
    tokens-00001.bin   end-of-document id, and no document crosses files
    offsets.bin        little-endian uint64 [num_documents + 1]: where each document starts in the
                       concatenated tokens, and at the end their number
    rejected.jsonl     one line for each document that was left out: where it stood, and why
    tokenizer.json     the tokenizer that made it (absent for the built-in one)

The folder is written under another name and renamed when it is complete.
"""

import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pydantic

from pith.disk import sha256_of

MANIFEST = "manifest.json"
OFFSETS = "offsets.bin"
REJECTED = "rejected.jsonl"
TOKENIZER = "tokenizer.json"
OFFSET_BYTES = 8
TOKENS_PER_FILE = 1 << 30

Ids = npt.NDArray[np.int64]
TokenDtype = Literal["uint16", "uint32"]


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Frozen):
    """One file of the folder; its name can mean nothing outside the folder."""

    name: str = pydantic.Field(pattern=r"^[a-z][a-z0-9-]*\.(bin|jsonl|json)$")
    size_bytes: pydantic.NonNegativeInt
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")


class TokenFile(FileEntry):
    """A file of token ids."""

    num_tokens: pydantic.PositiveInt


class Manifest(_Frozen):
    """What a corpus folder says of itself."""

    format: Literal["pith/tokens/1"] = "pith/tokens/1"
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: pydantic.PositiveInt
    end_of_document: pydantic.NonNegativeInt
    dtype: TokenDtype
    num_tokens: pydantic.PositiveInt
    num_documents: pydantic.PositiveInt
    num_rejected: pydantic.NonNegativeInt
    token_files: tuple[TokenFile, ...] = pydantic.Field(min_length=1)
    other_files: tuple[FileEntry, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return (*self.token_files, *self.other_files)


def token_dtype(vocab_size: int) -> TokenDtype:
    """The narrowest type that holds every id of a vocabulary (added tokens included)."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class CorpusWriter:
    """Appends documents to the files of a folder, starting where they end."""

    def __init__(
        self, folder: Path, *, dtype: TokenDtype, tokens_per_file: int = TOKENS_PER_FILE
    ) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens_per_file = tokens_per_file
        self._offsets = (folder / OFFSETS).open("ab")
        self._rejected = (folder / REJECTED).open("ab")
        self._token_files = sorted(path.name for path in folder.glob("tokens-*.bin"))
        sizes = [(folder / name).stat().st_size for name in self._token_files]
        self.num_tokens = sum(sizes) // self._dtype.itemsize
        self._tokens_in_file = sizes[-1] // self._dtype.itemsize if sizes else 0
        if not sizes:
            self._token_files = ["tokens-00000.bin"]
            self._offsets.write(bytes(OFFSET_BYTES))
        self._tokens = (folder / self._token_files[-1]).open("ab")

    def add(self, tokens: npt.NDArray[np.generic], *, lengths: list[int]) -> None:
        """Adds documents of `lengths` tokens, which follow each other in `tokens`.

        Each ends with the end-of-document id, which its length counts.
        """
        start = 0
        stored = tokens.astype(self._dtype)
        for length in lengths:
            if self._tokens_in_file and self._tokens_in_file + length > self._tokens_per_file:
                self._next_file()
            self._tokens.write(stored[start : start + length].tobytes())
            start += length
            self._tokens_in_file += length
        ends = self.num_tokens + np.cumsum(lengths, dtype="<u8")
        self._offsets.write(ends.astype("<u8").tobytes())
        self.num_tokens += start

    def reject(self, where: str, reason: str) -> None:
        """Notes a document that was left out."""
        line = json.dumps({"where": where, "reason": reason}, ensure_ascii=False)
        self._rejected.write(line.encode("utf-8", "backslashreplace") + b"\n")

    def sync(self) -> dict[str, int]:
        """Size in bytes of each file, all of it on disk."""
        for file in (self._tokens, self._offsets, self._rejected):
            file.flush()
            os.fsync(file.fileno())
        names = (*self._token_files, OFFSETS, REJECTED)
        return {name: (self._folder / name).stat().st_size for name in names}

    def close(self) -> None:
        """Closes the files; what was added since the last sync may or may not be on disk."""
        for file in (self._tokens, self._offsets, self._rejected):
            file.close()

    def token_files(self) -> tuple[TokenFile, ...]:
        """The entries of the token files, read back from disk."""
        entries = (describe(self._folder / name) for name in self._token_files)
        width = self._dtype.itemsize
        return tuple(TokenFile(**dict(e), num_tokens=e.size_bytes // width) for e in entries)

    def _next_file(self) -> None:
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        self._token_files.append(f"tokens-{len(self._token_files):05d}.bin")
        self._tokens = (self._folder / self._token_files[-1]).open("ab")
        self._tokens_in_file = 0


def describe(path: Path) -> FileEntry:
    """Size and checksum of a file, read back from disk."""
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path))
