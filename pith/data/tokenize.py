"""`pith tokenize`: documents of files become a corpus folder.

One process reads and writes, in order; the others turn records into ids. What is written depends
on the inputs and the tokenizer alone. The work goes on in OUT.partial, where progress.json says
how many records are safely on disk; after a kill the same call continues from there.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from pith.data.ahead import WorkerLostError, in_processes
from pith.data.readers import BadLineError, Record, excerpt, find_files, read_records, text_of
from pith.data.shards import (
    MANIFEST,
    OFFSETS,
    REJECTED,
    TOKENIZER,
    TOKENS_PER_FILE,
    CorpusWriter,
    Ids,
    Manifest,
    describe,
    token_dtype,
)
from pith.data.tokenizer import BYTES, TextError, Tokenizer, open_tokenizer
from pith.disk import is_disk_trouble, sync, write_durably
from pith.errors import RequestError, RunFailedError

_PROGRESS = "progress.json"
_LOCK = "lock"
_UNIT_RECORDS = 512
_UNIT_BYTES = 1 << 20
_UNITS_BETWEEN_SAVES = 16
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What a run of `tokenize` did: documents_in = documents_out + num_empty + num_bad."""

    path: Path
    documents_in: int
    documents_out: int
    num_empty: int
    num_bad: int
    num_tokens: int
    files: tuple[str, ...]
    rejected: tuple[dict[str, str], ...]  # the first of rejected.jsonl: where, reason
    records_reused: int  # done by an earlier run that was stopped


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: how many records, and the bytes of each file that hold exactly these."""

    job: str
    records: int = 0
    num_empty: int = 0
    num_bad: int = 0
    num_tokens: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rejection:
    where: str
    reason: str
    excerpt: str = ""  # only of a bad line


@dataclass(frozen=True, slots=True)
class _Encoded:
    num_records: int
    tokens: Ids
    lengths: list[int]
    rejections: list[_Rejection]


_Encode = Callable[[list[Record]], _Encoded]


def tokenize(
    inputs: Sequence[str],
    *,
    out: Path,
    tokenizer: str = BYTES,
    end_token: str | None = None,
    text_key: str = "text",
    workers: int | None = None,
    max_bad_lines: int = 0,
    tokens_per_file: int = TOKENS_PER_FILE,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Tokenized:
    """Makes the corpus folder `out`, which must not exist, from files and folders.

    `workers` defaults to one for each core. `max_bad_lines` are left out; one more stops the run.
    Raises RequestError for anything wrong with the inputs and RunFailedError if the work fails;
    then `out` does not exist.
    """
    opened = open_tokenizer(tokenizer, end_token=end_token)
    files = find_files(inputs)
    if not out.name:
        raise _refused(out, "this folder exists already", "the name of a folder to make")
    draft = out.with_name(f"{out.name}.partial")
    job = _fingerprint(files, opened, text_key, tokens_per_file)
    in_worker = partial(_encode_in_worker, tokenizer, end_token, opened.fingerprint, text_key)
    here = partial(_encode, opened, text_key)
    records = chain.from_iterable(read_records(file, text_key=text_key) for file in files)
    try:
        with _claimed(draft, out):
            start = _restore(draft, job=job)
            units = _units(islice(records, start.records, None))
            dtype = token_dtype(opened.vocab_size)
            with (
                closing(
                    _encoded(workers or os.cpu_count() or 1, here, in_worker, units)
                ) as encoded,
                closing(
                    CorpusWriter(draft, dtype=dtype, tokens_per_file=tokens_per_file)
                ) as writer,
            ):
                done = _write(
                    writer,
                    encoded,
                    start,
                    draft=draft,
                    max_bad_lines=max_bad_lines,
                    on_progress=on_progress,
                )
                if done.num_tokens == 0:
                    shutil.rmtree(draft)
                    raise _no_documents(inputs, done)
                manifest = _describe(writer, draft, done, opened, tokenizer)
            summary = _summary(out, draft, manifest, done, start)
            _publish(draft, out, manifest)
            return summary
    except OSError as error:
        raise _failed(f"tokenizing stopped ({error})") from error
    except WorkerLostError as error:
        raise _failed("a tokenizing process was killed, perhaps for its memory") from error


def _fingerprint(
    files: list[Path], tokenizer: Tokenizer, text_key: str, tokens_per_file: int
) -> str:
    """Names the work: equal if what an earlier run wrote can be kept."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    ids = (tokenizer.fingerprint, tokenizer.end_of_document, text_key, tokens_per_file)
    return hashlib.sha256(json.dumps([ids, stats]).encode()).hexdigest()


def _units(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Records in bundles worth sending to another process."""
    unit: list[Record] = []
    size_bytes = 0
    for record in records:
        unit.append(record)
        size_bytes += record.size_bytes
        if len(unit) == _UNIT_RECORDS or size_bytes >= _UNIT_BYTES:
            yield unit
            unit, size_bytes = [], 0
    if unit:
        yield unit


def _encode(tokenizer: Tokenizer, text_key: str, records: list[Record]) -> _Encoded:
    texts: list[str] = []
    places: list[str] = []
    rejections: list[_Rejection] = []
    for record in records:
        try:
            text = text_of(record, text_key=text_key)
        except BadLineError as error:
            rejections.append(_Rejection(record.where, str(error), excerpt(record)))
            continue
        if text.strip():
            texts.append(text)
            places.append(record.where)
        else:
            rejections.append(_Rejection(record.where, "empty"))
    end = np.array([tokenizer.end_of_document])
    try:
        documents = [np.append(ids, end) for ids in tokenizer.encode(texts)]
    except TextError as error:
        raise _not_encoded(tokenizer, error, where=places[error.index]) from None
    tokens = np.concatenate(documents) if documents else np.empty(0, dtype=np.int64)
    return _Encoded(len(records), tokens, [len(ids) for ids in documents], rejections)


def _not_encoded(tokenizer: Tokenizer, error: TextError, *, where: str) -> RequestError:
    return RequestError(
        "data.tokenizer",
        what=f"the tokenizer {tokenizer.name} cannot encode this document",
        found=error.reason,
        wanted="a tokenizer that takes any text",
        where=where,
    )


def _encode_in_worker(
    source: str, end_token: str | None, fingerprint: str, text_key: str, records: list[Record]
) -> _Encoded:
    return _encode(_worker_tokenizer(source, end_token, fingerprint), text_key, records)


@lru_cache(maxsize=1)  # a tokenizer takes longer to open than a unit to encode
def _worker_tokenizer(source: str, end_token: str | None, fingerprint: str) -> Tokenizer:
    tokenizer = open_tokenizer(source, end_token=end_token)
    if tokenizer.fingerprint != fingerprint:
        raise _failed(f"{source} changed while it was used")
    return tokenizer


def _encoded(
    workers: int, here: _Encode, in_worker: _Encode, units: Iterator[list[Record]]
) -> Generator[_Encoded, None, None]:
    """The units encoded, in order, by this process or by `workers` others."""
    if workers == 1:
        yield from map(here, units)
    else:
        yield from in_processes(in_worker, units, num_workers=workers)


@contextmanager
def _claimed(draft: Path, out: Path) -> Iterator[None]:
    """Holds the draft folder against other processes; a killed holder holds it no longer."""
    if os.path.lexists(out):
        raise _refused(out, "the output exists already", "another --out, or an empty place")
    try:
        draft.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the name holds a zero byte
        if isinstance(error, OSError) and is_disk_trouble(error):
            raise
        raise _refused(out, f"no folder can be made here ({error})", "another --out") from None
    with (draft / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(draft, "another process is writing here", "one at a time") from None
        if out.exists():
            raise _refused(out, "another process has just made this", "another --out")
        yield


def _restore(draft: Path, *, job: str) -> Progress:
    """Brings the draft back to what progress.json says of this job, or to nothing."""
    try:
        start = Progress(**json.loads((draft / _PROGRESS).read_bytes()))
        whole = all((draft / name).stat().st_size >= n for name, n in start.sizes.items())
    except (FileNotFoundError, ValueError, TypeError):
        start, whole = Progress(job), False
    if start.job != job or not whole:
        start = Progress(job)
    for file in draft.iterdir():
        if file.name in start.sizes:
            os.truncate(file, start.sizes[file.name])
        elif file.name not in (_LOCK, _PROGRESS):
            file.unlink()
    return start


def _write(
    writer: CorpusWriter,
    encoded: Iterator[_Encoded],
    done: Progress,
    *,
    draft: Path,
    max_bad_lines: int,
    on_progress: Callable[[Progress], None],
) -> Progress:
    """Writes unit after unit; whatever ends it, what was written so far is kept."""
    try:
        for count, unit in enumerate(encoded, start=1):
            bad = [rejection for rejection in unit.rejections if rejection.excerpt]
            if done.num_bad + len(bad) > max_bad_lines:
                raise _bad_line(bad[max_bad_lines - done.num_bad], max_bad_lines)
            writer.add(unit.tokens, lengths=unit.lengths)
            for rejection in unit.rejections:
                writer.reject(rejection.where, rejection.reason)
            done = replace(
                done,
                records=done.records + unit.num_records,
                num_empty=done.num_empty + len(unit.rejections) - len(bad),
                num_bad=done.num_bad + len(bad),
                num_tokens=writer.num_tokens,
            )
            if count % _UNITS_BETWEEN_SAVES == 0:
                _save(draft, done, writer)
            on_progress(done)
    finally:
        _save(draft, done, writer)
    return done


def _no_documents(inputs: Sequence[str], done: Progress) -> RequestError:
    more = ", ..." if len(inputs) > 3 else ""
    return RequestError(
        "data.no_documents",
        what="no document came out",
        found=f"{done.num_empty} empty and {done.num_bad} bad of {done.records}",
        wanted="at least 1 document with text",
        where=", ".join(inputs[:3]) + more,
    )


def _save(draft: Path, done: Progress, writer: CorpusWriter) -> None:
    progress = replace(done, sizes=writer.sync())
    write_durably(draft / _PROGRESS, json.dumps(asdict(progress)).encode())


def _describe(
    writer: CorpusWriter, draft: Path, done: Progress, opened: Tokenizer, source: str
) -> Manifest:
    names = [OFFSETS, REJECTED]
    if opened.name != BYTES:
        shutil.copyfile(source, draft / TOKENIZER)
        names.append(TOKENIZER)
    return Manifest(
        tokenizer=opened.name,
        tokenizer_fingerprint=opened.fingerprint,
        vocab_size=opened.vocab_size,
        end_of_document=opened.end_of_document,
        dtype=token_dtype(opened.vocab_size),
        num_tokens=done.num_tokens,
        num_documents=done.records - done.num_empty - done.num_bad,
        num_rejected=done.num_empty + done.num_bad,
        token_files=writer.token_files(),
        other_files=tuple(describe(draft / name) for name in names),
    )


def _summary(
    out: Path, draft: Path, manifest: Manifest, done: Progress, start: Progress
) -> Tokenized:
    with (draft / REJECTED).open("rb") as file:
        listed = tuple(json.loads(line) for line in islice(file, _LISTED))
    return Tokenized(
        path=out,
        documents_in=done.records,
        documents_out=manifest.num_documents,
        num_empty=done.num_empty,
        num_bad=done.num_bad,
        num_tokens=manifest.num_tokens,
        files=(*(entry.name for entry in manifest.files), MANIFEST),
        rejected=listed,
        records_reused=start.records,
    )


def _publish(draft: Path, out: Path, manifest: Manifest) -> None:
    write_durably(draft / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
    for name in (_PROGRESS, _LOCK):
        (draft / name).unlink()
    sync(draft)
    draft.rename(out)
    sync(out.parent)


def _bad_line(rejection: _Rejection, max_bad_lines: int) -> RequestError:
    limit = f" (more than {max_bad_lines} bad lines)" if max_bad_lines else ""
    return RequestError(
        "data.bad_line",
        what=rejection.reason + limit,
        found=rejection.excerpt,
        where=rejection.where,
        next_step="mend the line, or leave it out with pith tokenize --on-bad-line skip",
    )


def _refused(path: Path, what: str, wanted: str) -> RequestError:
    return RequestError("data.output", what=what, wanted=wanted, where=str(path))


def _failed(what: str) -> RunFailedError:
    return RunFailedError(
        "data.tokenize", what=what, next_step="run the same command again, it continues"
    )
