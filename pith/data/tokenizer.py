"""From text to token ids: the built-in byte-level tokenizer, or a local tokenizer.json."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pith.data.shards import Ids
from pith.errors import RequestError

BYTES = "bytes"
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)


class TextError(Exception):
    """Why a tokenizer takes none of text number `index`."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index
        self.reason = reason


class Tokenizer(Protocol):
    """What turns texts into ids. `fingerprint` is equal if and only if the ids are."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...

    def encode(self, texts: list[str]) -> list[Ids]:
        """The ids of each text, without any token around it.

        Raises TextError for the first text that cannot be encoded.
        """
        ...

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens left out."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 as the end of a document."""

    name: str = BYTES
    vocab_size: int = 257
    end_of_document: int = 256

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"utf-8 bytes are ids, 256 ends a document").hexdigest()

    def encode(self, texts: list[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Ids) -> str:
        return bytes(ids[ids < 256].astype(np.uint8)).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` library."""

    name: str
    fingerprint: str
    vocab_size: int
    end_of_document: int
    library: Any

    def encode(self, texts: list[str]) -> list[Ids]:
        try:
            batch = self.library.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower, and not for which text
            if len(texts) > 1:
                return [self._encode_one(text, index) for index, text in enumerate(texts)]
            raise TextError(0, " ".join(str(error).split())[:120]) from None
        return [np.array(encoding.ids, dtype=np.int64) for encoding in batch]

    def _encode_one(self, text: str, index: int) -> Ids:
        try:
            return self.encode([text])[0]
        except TextError as error:
            raise TextError(index, error.reason) from None

    def decode(self, ids: Ids) -> str:
        return str(self.library.decode(ids.tolist(), skip_special_tokens=True))


def open_tokenizer(source: str, *, end_token: str | None = None) -> Tokenizer:
    """The built-in tokenizer for "bytes", else the one in the file `source`.

    `end_token` names the token that ends a document; by default the first of END_TOKENS that the
    vocabulary knows. Raises RequestError for a file that is no tokenizer or has no such token.
    """
    if source == BYTES:
        if end_token is not None:
            raise _refused(BYTES, "the byte-level tokenizer has its own end token", "no --eod")
        return ByteTokenizer()
    path = Path(source)
    if not os.path.isfile(source):
        raise _refused(
            repr(source)[1:-1], "there is no such tokenizer file", 'a tokenizer.json, or "bytes"'
        )
    refuse_pointer(path)
    content = path.read_bytes()
    library = _load(source, content)
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    return FileTokenizer(
        name=path.name,
        fingerprint=hashlib.sha256(content).hexdigest(),
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        end_of_document=_end_id(source, vocabulary, end_token),
        library=library,
    )


def refuse_pointer(path: Path) -> None:
    """Raises RequestError if a file cannot be read or is a Git LFS pointer to the file meant."""
    try:
        with path.open("rb") as file:
            start = file.read(42)
    except OSError as error:
        what = f"the file cannot be read ({error.strerror})"
        raise RequestError("data.input", what=what, where=str(path)) from error
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise RequestError(
            "data.pointer",
            what="this is a Git LFS pointer, not the file itself",
            where=str(path),
            next_step="git lfs pull, or download the file",
        )


def _load(source: str, content: bytes) -> Any:
    import tokenizers  # noqa: PLC0415  only those who use a file pay for the library

    try:
        library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())[:120]
        raise _refused(source, f"not a tokenizer ({reason})", "a tokenizer.json") from None
    # Settings for prompts would cut or lengthen documents; the text of a special token is text.
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


def _end_id(source: str, vocabulary: dict[str, int], end_token: str | None) -> int:
    if end_token is not None:
        if end_token not in vocabulary:
            raise _refused(source, f"the vocabulary has no token {end_token!r}", "another --eod")
        return vocabulary[end_token]
    for name in END_TOKENS:
        if name in vocabulary:
            return vocabulary[name]
    raise _refused(
        source,
        "this tokenizer has no token known to end a document",
        f"--eod NAME, or one of {' '.join(END_TOKENS)}",
    )


def _refused(source: str, what: str, wanted: str) -> RequestError:
    return RequestError("data.tokenizer", what=what, wanted=wanted, where=source)
