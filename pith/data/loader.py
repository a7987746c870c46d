"""Batches of a corpus for the steps of a run.

Shape letters: N sequences of S tokens.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from pith.data.ahead import in_order
from pith.data.corpus import TokenCorpus
from pith.data.order import sample_index
from pith.data.shards import Ids
from pith.data.split import Split, split_documents
from pith.data.tokenize import tokenize
from pith.errors import RequestError
from pith.ops.cross_entropy import NOT_COUNTED

EMBEDDED = "embedded"
_BATCHES_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step; a label of -100 is not counted in the loss."""

    tokens_NS: Ids
    labels_NS: Ids
    sample_ids: Ids  # [N] number of each window in its split

    @property
    def num_counted(self) -> int:
        """Labels that count in the loss."""
        return int((self.labels_NS != NOT_COUNTED).sum())

    def take(self, rows: slice) -> "Batch":
        """Only some of the sequences."""
        return Batch(self.tokens_NS[rows], self.labels_NS[rows], self.sample_ids[rows])

    def digest(self) -> str:
        """Equal for equal sequences and labels."""
        whole = hashlib.sha256(np.ascontiguousarray(self.tokens_NS).tobytes())
        whole.update(np.ascontiguousarray(self.labels_NS).tobytes())
        return whole.hexdigest()


class Loader:
    """Samples are windows of S + 1 tokens with stride S over the documents that train.

    Everything a method returns depends on its arguments and the constructor's alone. A step reads
    the next global_batch_size samples of the run, which order.py places: where it stands is one
    integer, the number of its first sample.

    Packing "none" trains across document ends; "mask" does not count the label that is the first
    token of another document. `epochs` limits the run; None repeats the corpus for ever.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        validation_fraction: float,
        packing: Literal["none", "mask"] = "none",
        epochs: int | None = None,
    ) -> None:
        assert sequence_length > 0
        assert global_batch_size > 0
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._packing = packing
        self._epochs = epochs
        self._training, self._validation = split_documents(
            corpus, validation_fraction=validation_fraction
        )

    @property
    def fingerprint(self) -> str:
        """That of the corpus: equal for equal tokens, wherever they lie."""
        return self._corpus.fingerprint

    @property
    def tokenizer(self) -> str:
        """Name and fingerprint of what made the corpus."""
        manifest = self._corpus.manifest
        return f"{manifest.tokenizer} {manifest.tokenizer_fingerprint}"

    @property
    def num_train_samples(self) -> int:
        """Windows in one epoch."""
        return self._num_windows(self._training)

    @property
    def num_validation_samples(self) -> int:
        """Windows held out."""
        return self._num_windows(self._validation)

    def check(
        self, num_steps: int, *, first_sample: int = 0, num_validation_sequences: int = 0
    ) -> None:
        """Raises RequestError if the corpus cannot serve `num_steps` from `first_sample` on."""
        if self.num_train_samples < self._global_batch_size:
            raise self._too_small(
                "the corpus is smaller than one global batch",
                found=f"{self.num_train_samples} training sequences",
                wanted=f"at least {self._global_batch_size}",
            )
        if self._epochs is not None:
            needed, held = (
                first_sample + num_steps * self._global_batch_size,
                self._epochs * self.num_train_samples,
            )
            if needed > held:
                raise self._too_small(
                    f"the corpus does not last for {num_steps} steps",
                    found=f"{held} sequences in {self._epochs} epochs",
                    wanted=f"{needed}",
                )
        if self.num_validation_samples < num_validation_sequences:
            raise self._too_small(
                "the documents held out are too few for validation",
                found=f"{self.num_validation_samples} sequences",
                wanted=f"at least {num_validation_sequences}",
            )

    def batch(self, first_sample: int, *, rows: slice = slice(None)) -> Batch:
        """The global batch that starts at a sample of the run, or only some `rows` of it."""
        return self._read(self._training, self.sample_ids(first_sample)[rows])

    def sample_ids(self, first_sample: int) -> Ids:
        """Which windows the global batch that starts at a sample of the run reads [N]."""
        numbers = np.arange(first_sample, first_sample + self._global_batch_size)
        _, windows = sample_index(numbers, num_samples=self.num_train_samples, seed=self._seed)
        return windows

    def validation(self, num_sequences: int) -> Batch:
        """Evenly spaced windows of the documents held out, the same at every call."""
        assert 0 < num_sequences <= self.num_validation_samples
        windows = np.arange(num_sequences) * self.num_validation_samples // num_sequences
        return self._read(self._validation, windows)

    @contextmanager
    def stream(
        self, first_sample: int, num_steps: int, *, rows: slice = slice(None)
    ) -> Iterator[Iterator[Batch]]:
        """The batches of `num_steps` steps from a sample on, read ahead on one thread.

        What goes wrong on the thread is raised where the batch is taken. Leaving the context ends
        the thread.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        try:
            stop = first_sample + num_steps * self._global_batch_size
            starts = range(first_sample, stop, self._global_batch_size)
            yield in_order(pool, partial(self.batch, rows=rows), starts, ahead=_BATCHES_AHEAD)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, split: Split, windows: Ids) -> Batch:
        S = self._sequence_length
        tokens_NT = np.empty((len(windows), S + 1), dtype=np.int64)
        starts_NT = np.empty((len(windows), S + 1), dtype=np.bool_)
        for row, window in enumerate(windows.tolist()):
            tokens_NT[row], starts_NT[row] = split.window(window * S, S + 1)
        labels_NS = tokens_NT[:, 1:].copy()
        if self._packing == "mask":
            labels_NS[starts_NT[:, 1:]] = NOT_COUNTED
        return Batch(tokens_NS=tokens_NT[:, :-1].copy(), labels_NS=labels_NS, sample_ids=windows)

    def _num_windows(self, split: Split) -> int:
        return max(0, split.num_tokens - 1) // self._sequence_length

    def _too_small(self, what: str, *, found: str, wanted: str) -> RequestError:
        return RequestError(
            "data.too_small",
            what=what,
            found=f"{found} of {self._sequence_length} tokens",
            wanted=wanted,
            where=str(self._corpus.path),
            next_step="add text, or lower the batch size, the sequence length or the steps",
        )


def prepare(corpus: str, *, work_dir: Path, verify: bool = True) -> TokenCorpus:
    """The corpus that a recipe names, ready to read.

    A folder made by `pith tokenize` is opened as it is. A text file, or "embedded" for the text
    that comes with pith, is turned into bytes under `work_dir` once; several processes may ask for
    the same at the same time.
    """
    if corpus == EMBEDDED:
        text = resources.files("pith.data") / "embedded" / "python-docs.jsonl"
        with resources.as_file(text) as source:
            return TokenCorpus.open(_tokenized_once(source, work_dir=work_dir), verify=verify)
    path = Path(corpus)
    if os.path.isfile(path):
        path = _tokenized_once(path, work_dir=work_dir)
    return TokenCorpus.open(path, verify=verify)


def _tokenized_once(source: Path, *, work_dir: Path) -> Path:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = work_dir / f"corpus-{digest[:16]}"
    if target.exists():
        return target
    # Each process writes under a name of its own; the first rename wins and the others give way.
    own = work_dir / f".corpus-{uuid.uuid4().hex}"
    try:
        tokenize([str(source)], out=own, workers=1)
        own.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        for leftover in work_dir.glob(f"{own.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    return target
