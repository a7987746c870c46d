"""Documents of input files, one after the other; memory does not grow with a file.

.jsonl .jsonl.gz .jsonl.zst   one JSON object a line; blank lines are no documents
.parquet                      one row is one document; null and non-text values are bad lines
.txt                          the whole file is one document

A byte order mark at the start of a file is dropped. A document of white space only is "empty": it
is left out and counted, and is not an error. A record that cannot be understood is a bad line.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pith.data.tokenizer import refuse_pointer
from pith.errors import RequestError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")

_BLOCK_BYTES = 1 << 20
_ROWS = 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One document as it stands in a file, not yet understood."""

    path: str
    line: int  # from 1; the row in a .parquet file
    content: bytes | str | None
    is_json: bool

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def size_bytes(self) -> int:
        return len(self.content) if self.content is not None else 0


class BadLineError(Exception):
    """Why a record gives no text."""


def find_files(inputs: Iterable[str]) -> list[Path]:
    """The files meant by paths of files and folders (all files below them, sorted by name).

    Raises RequestError for a path that does not exist or is not one of SUFFIXES.
    """
    found: list[Path] = []
    for name in inputs:
        if not name:
            raise _unreadable("''", "an empty name is no file or folder")
        path = Path(name)
        if not os.path.exists(name):
            raise _unreadable(repr(name)[1:-1], "there is no such file or folder")
        below = [file for file in sorted(path.rglob("*")) if file.is_file()]
        visible = [file for file in below if not file.name.startswith(".")]
        found += visible if path.is_dir() else [path]
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise RequestError(
                "data.format",
                what="this kind of file is not read",
                found=file.name,
                wanted=" ".join(SUFFIXES),
                where=str(file),
            )
        refuse_pointer(file)
    return found


def read_records(path: Path, *, text_key: str) -> Iterator[Record]:
    """The records of one file. Raises RequestError where the file is damaged or cut short."""
    name = str(path)
    if path.name.endswith(".parquet"):
        yield from _rows(path, text_key=text_key)
    elif path.name.endswith(".txt"):
        yield Record(name, 1, path.read_bytes().removeprefix(_BOM), is_json=False)
    else:
        line = 0
        try:
            for line, content in enumerate(_lines(path), start=1):
                kept = content.removeprefix(_BOM) if line == 1 else content
                if kept.strip():
                    yield Record(name, line, kept.rstrip(b"\r\n"), is_json=True)
        except (EOFError, OSError, zlib.error, _zstd_error()) as error:
            what = f"the file is cut short or damaged after line {line} ({error})"
            raise _unreadable(name, what) from error


def text_of(record: Record, *, text_key: str) -> str:
    """The text of a record. Raises BadLineError with the reason if it has none."""
    content = record.content
    if isinstance(content, bytes):
        content = _decoded(content)
    if record.is_json:
        assert content is not None
        content = _json_text(content, text_key=text_key)
    if content is None:
        raise BadLineError(f"{text_key} is null")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise BadLineError("the text holds half of a surrogate pair") from None
    return content


def excerpt(record: Record) -> str:
    """The first 80 characters of a record, fit for one line."""
    content = record.content
    if isinstance(content, bytes):
        content = content[:400].decode(errors="replace")
    return repr((content or "").strip()[:80])


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n")
        within = f" in line {line + 1}" if line else ""
        raise BadLineError(f"invalid UTF-8 at byte {error.start}{within}") from None


def _json_text(content: str, *, text_key: str) -> str:
    try:
        value: Any = json.loads(content)
    except json.JSONDecodeError as error:
        extra = error.msg == "Extra data"
        what = "more than one JSON value on the line" if extra else f"not JSON ({error.msg})"
        raise BadLineError(f"{what}, at character {error.pos + 1}") from None
    except (RecursionError, ValueError) as error:
        raise BadLineError(f"not readable as JSON ({str(error)[:60]})") from None
    if not isinstance(value, dict):
        raise BadLineError(f"a JSON {_kind(value)} where an object was expected")
    if text_key not in value:
        raise BadLineError(f"no key {text_key!r}; there are: {', '.join(map(repr, value))[:60]}")
    if not isinstance(value[text_key], str):
        raise BadLineError(f"{text_key!r} is a {_kind(value[text_key])}, not a text")
    return str(value[text_key])


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _lines(path: Path) -> Iterator[bytes]:
    if path.name.endswith(".jsonl"):
        with path.open("rb") as file:
            yield from file
    elif path.stat().st_size == 0:
        raise EOFError("the compressed file is empty")
    elif path.name.endswith(".gz"):
        with gzip.open(path, "rb") as unpacked:
            yield from unpacked
    else:
        with path.open("rb") as file:
            yield from _split_lines(_unpack_zstd(file))


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        head, *lines = block.split(b"\n")
        rest.append(head)
        for line in lines:
            yield b"".join(rest) + b"\n"
            rest = [line]
    if any(rest):
        yield b"".join(rest)


def _unpack_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """The frames of a file one after the other; a frame without its end is an error.

    The library's own file reader takes a frame cut short for a complete one.
    """
    import zstandard  # noqa: PLC0415

    frame = None
    while block := file.read(_BLOCK_BYTES):
        while block:
            if frame is None:
                unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                frame = unpacker.decompressobj()
            yield frame.decompress(block)
            block = b""
            if frame.eof:
                block, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last zstd frame has no end")


def _zstd_error() -> type[Exception]:
    import zstandard  # noqa: PLC0415

    return zstandard.ZstdError


def _rows(path: Path, *, text_key: str) -> Iterator[Record]:
    import pyarrow  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_key not in schema.names:
                columns = ", ".join(schema.names)[:80]
                raise _unreadable(str(path), f"no column {text_key!r}; there are: {columns}")
            kind = schema.field(text_key).type
            is_dictionary = pyarrow.types.is_dictionary(kind)
            if (kind.value_type if is_dictionary else kind) not in _text_types():
                raise _unreadable(str(path), f"column {text_key!r} is {kind}, not text")
            for batch in file.iter_batches(batch_size=_ROWS, columns=[text_key]):
                for value in batch.column(0).cast(pyarrow.large_string()):
                    row += 1
                    yield Record(str(path), row, _row_text(value), is_json=False)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise _unreadable(str(path), f"damaged after row {row} ({reason})") from error


def _text_types() -> tuple[Any, ...]:
    import pyarrow  # noqa: PLC0415

    return pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()


def _row_text(value: Any) -> bytes | None:
    """Bytes, because a column called text may still hold invalid UTF-8."""
    return None if not value.is_valid else value.as_buffer().to_pybytes()


def _unreadable(where: str, what: str) -> RequestError:
    return RequestError("data.input", what=what, where=where)
