"""A tokenized corpus opened for reading, and everything that is checked before it is read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from pith.data.shards import (
    MANIFEST,
    OFFSET_BYTES,
    OFFSETS,
    TOKENIZER,
    FileEntry,
    Ids,
    Manifest,
    TokenFile,
    describe,
    token_dtype,
)
from pith.data.tokenizer import BYTES, ByteTokenizer
from pith.errors import RequestError

_CHUNK = 1 << 22  # items looked at together, so that memory stays constant at any size

_Mapped = np.memmap[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class TokenCorpus:
    """Token ids and document boundaries, mapped from files that are never written.

    `fingerprint` is equal for equal tokens, documents and tokenizers, wherever they lie.
    """

    path: Path
    manifest: Manifest
    token_maps: tuple[_Mapped, ...]
    file_starts: Ids  # [num_files + 1] where each file starts in the concatenated tokens
    offsets: _Mapped  # [num_documents + 1] where each document starts

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> "TokenCorpus":
        """Opens a corpus folder; `verify` also reads all of it: token ids and checksums.

        Raises RequestError with the file and the position of the first fault.
        """
        try:
            return cls._open(path, verify=verify)
        except OSError as error:
            raise _refused(path, f"the corpus cannot be read ({error.strerror})") from error

    @classmethod
    def _open(cls, path: Path, *, verify: bool) -> "TokenCorpus":
        manifest = _read_manifest(path)
        for file in manifest.files:
            _check_size(path / file.name, file, manifest=manifest)
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # Offsets are mapped as signed numbers, so that a negative one is seen as such.
        offsets = np.memmap(path / OFFSETS, dtype="<i8", mode="r")
        _check_offsets(path / OFFSETS, offsets, manifest=manifest)
        counts = [entry.num_tokens for entry in manifest.token_files]
        corpus = cls(
            path=path,
            manifest=manifest,
            token_maps=tuple(
                np.memmap(path / entry.name, dtype=dtype, mode="r")
                for entry in manifest.token_files
            ),
            file_starts=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            offsets=offsets,
        )
        if verify:
            corpus._verify()
        return corpus

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def num_documents(self) -> int:
        return self.manifest.num_documents

    @property
    def fingerprint(self) -> str:
        read = [entry.sha256 for entry in self.manifest.files if entry.name.endswith(".bin")]
        facts = (self.manifest.tokenizer_fingerprint, self.manifest.dtype, *read)
        return hashlib.sha256(" ".join(facts).encode()).hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        """Tokens [stop - start] of the concatenated files."""
        assert 0 <= start <= stop <= self.num_tokens
        first, last = np.searchsorted(self.file_starts, [start, max(start, stop - 1)], "right") - 1
        pieces = []
        for k in range(first, last + 1):
            base = int(self.file_starts[k])
            pieces.append(self.token_maps[k][max(start - base, 0) : stop - base])
        return np.concatenate(pieces).astype(np.int64)

    def document(self, index: int) -> Ids:
        """The tokens of one document, its end-of-document id included."""
        return self.read(int(self.offsets[index]), int(self.offsets[index + 1]))

    def document_starts(self, start: int, stop: int) -> Ids:
        """Positions in range(start, stop) where a document starts."""
        first, last = np.searchsorted(self.offsets, [start, stop])
        return np.asarray(self.offsets[first:last], dtype=np.int64)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError if a model of `vocab_size` ids does not know all of this corpus."""
        if self.manifest.vocab_size > vocab_size:
            raise RequestError(
                "data.vocabulary",
                what="the vocabulary of the corpus does not fit into the model's",
                found=f"{self.manifest.vocab_size} ids ({self.manifest.tokenizer})",
                wanted=f"at most {vocab_size}",
                where=str(self.path / MANIFEST),
                next_step="tokenize with the tokenizer of this model, or change its vocab_size",
            )

    def _verify(self) -> None:
        for entry, tokens in zip(self.manifest.token_files, self.token_maps, strict=True):
            _check_tokens(self.path / entry.name, entry, tokens, self.manifest.vocab_size)
        for other in self.manifest.other_files:
            digest = describe(self.path / other.name).sha256
            _check_digest(self.path / other.name, other, digest)
        self._check_ends()

    def _check_ends(self) -> None:
        end = self.manifest.end_of_document
        for k, tokens in enumerate(self.token_maps):
            start, stop = int(self.file_starts[k]), int(self.file_starts[k + 1])
            first, last = np.searchsorted(self.offsets, [start, stop], "right")
            for chunk in range(first, last, _CHUNK):
                ends = self.offsets[chunk : min(chunk + _CHUNK, last)] - start - 1
                wrong = np.flatnonzero(tokens[ends] != end)
                if wrong.size:
                    raise _refused(
                        self.path / self.manifest.token_files[k].name,
                        f"document {chunk + int(wrong[0]) - 1} does not end with the "
                        f"end-of-document id at token {int(ends[wrong[0]])}",
                        found=str(int(tokens[ends[wrong[0]]])),
                        wanted=str(end),
                    )


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not path.exists():
        raise _refused(path, "there is no such corpus folder")
    if not file.is_file():
        raise _refused(file, "the manifest is missing, so this is no complete corpus")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise _refused(
            file,
            f"the manifest is damaged at {field} ({first['msg']})",
            found=repr(first["input"])[:80],
        ) from None
    _check_manifest(file, manifest)
    return manifest


def _check_manifest(file: Path, manifest: Manifest) -> None:
    names = {entry.name for entry in manifest.other_files}
    counted = sum(entry.num_tokens for entry in manifest.token_files)
    tokenizer = _tokenizer_digest(manifest)
    facts: tuple[tuple[str, object, object], ...] = (
        ("dtype", manifest.dtype, token_dtype(manifest.vocab_size)),
        ("num_tokens", manifest.num_tokens, counted),
        ("other_files", OFFSETS if OFFSETS in names else "no offsets", OFFSETS),
        ("tokenizer_fingerprint", manifest.tokenizer_fingerprint, tokenizer),
    )
    for field, found, wanted in facts:
        if found != wanted:
            raise _refused(
                file, f"{field} contradicts the rest", found=str(found), wanted=str(wanted)
            )
    if manifest.end_of_document >= manifest.vocab_size:
        raise _refused(
            file,
            "end_of_document is outside the vocabulary",
            found=str(manifest.end_of_document),
            wanted=f"less than {manifest.vocab_size}",
        )


def _tokenizer_digest(manifest: Manifest) -> str:
    if manifest.tokenizer == BYTES:
        return ByteTokenizer().fingerprint
    kept = [entry.sha256 for entry in manifest.other_files if entry.name == TOKENIZER]
    return kept[0] if kept else f"the sha256 of {TOKENIZER}"


def _check_size(file: Path, entry: FileEntry, *, manifest: Manifest) -> None:
    if not file.is_file():
        raise _refused(file, "the file is missing", wanted=f"{entry.size_bytes} bytes")
    size = file.stat().st_size
    if size != entry.size_bytes:
        raise _refused(
            file,
            "the file is empty" if size == 0 else "the file has the wrong size",
            found=f"{size} bytes",
            wanted=f"{entry.size_bytes} bytes",
        )
    if isinstance(entry, TokenFile):
        width = np.dtype(manifest.dtype).itemsize
        if size != entry.num_tokens * width:
            raise _refused(
                file,
                f"the size is not {entry.num_tokens} tokens of {width} bytes ({manifest.dtype})",
                found=f"{size} bytes",
                wanted=f"{entry.num_tokens * width} bytes",
            )
    if entry.name == OFFSETS and size != (manifest.num_documents + 1) * OFFSET_BYTES:
        raise _refused(
            file,
            f"the size is not that of {manifest.num_documents} documents",
            found=f"{size} bytes",
            wanted=f"{(manifest.num_documents + 1) * OFFSET_BYTES} bytes",
        )


def _check_offsets(file: Path, offsets: _Mapped, *, manifest: Manifest) -> None:
    for position, wanted in ((0, 0), (manifest.num_documents, manifest.num_tokens)):
        if offsets[position] != wanted:
            raise _refused(
                file,
                f"offset {position} is wrong",
                found=str(int(offsets[position])),
                wanted=str(wanted),
            )
    for start in range(0, manifest.num_documents, _CHUNK):
        chunk = offsets[start : start + _CHUNK + 1]
        falling = np.flatnonzero(chunk[1:] <= chunk[:-1])
        if falling.size:
            position = start + int(falling[0]) + 1
            raise _refused(
                file,
                f"offset {position} does not follow the one before",
                found=str(int(offsets[position])),
                wanted=f"more than {int(offsets[position - 1])}",
            )


def _check_tokens(file: Path, entry: TokenFile, tokens: _Mapped, vocab_size: int) -> None:
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _CHUNK):
        chunk = np.ascontiguousarray(tokens[start : start + _CHUNK])
        outside = np.flatnonzero(chunk >= vocab_size)
        if outside.size:
            first = int(outside[0])
            raise _refused(
                file,
                f"token {start + first} is outside the vocabulary",
                found=str(int(chunk[first])),
                wanted=f"less than {vocab_size}",
            )
        digest.update(chunk.data)
    _check_digest(file, entry, digest.hexdigest())


def _check_digest(file: Path, entry: FileEntry, digest: str) -> None:
    if digest != entry.sha256:
        raise _refused(
            file,
            "the content is not what was written (sha256)",
            found=digest[:16],
            wanted=entry.sha256[:16],
        )


def _refused(file: Path, what: str, *, found: str = "", wanted: str = "") -> RequestError:
    return RequestError(
        "data.corpus",
        what=what,
        found=found,
        wanted=wanted,
        where=str(file),
        next_step="make the corpus again with pith tokenize, or copy it again",
    )
