"""Which documents train and which validate, each side read as one sequence of tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pith.data.corpus import TokenCorpus
from pith.data.shards import Ids
from pith.errors import RequestError


@dataclass(frozen=True, slots=True)
class Split:
    """Runs of neighbouring documents of a corpus, concatenated."""

    corpus: TokenCorpus
    starts: Ids  # [R] where each run starts in the corpus
    positions: Ids  # [R + 1] where each run starts in the split, then the number of its tokens

    @property
    def num_tokens(self) -> int:
        return int(self.positions[-1])

    def window(self, position: int, count: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Tokens [count] from `position` on, and which of them are the first of a document."""
        assert position >= 0
        assert position + count <= self.num_tokens
        tokens = np.empty(count, dtype=np.int64)
        is_first = np.zeros(count, dtype=np.bool_)
        run = int(np.searchsorted(self.positions, position, "right")) - 1
        done = 0
        while done < count:
            start = int(self.starts[run] + position + done - self.positions[run])
            length = min(count - done, int(self.positions[run + 1]) - position - done)
            tokens[done : done + length] = self.corpus.read(start, start + length)
            is_first[self.corpus.document_starts(start, start + length) - start + done] = True
            done, run = done + length, run + 1
        return tokens, is_first


def split_documents(corpus: TokenCorpus, *, validation_fraction: float) -> tuple[Split, Split]:
    """(training, validation): every document is on exactly one side.

    Held out are evenly spaced documents, about `validation_fraction` of them and at least one;
    none if the fraction is 0. The rule knows no seed, so a document held out once stays so.
    """
    if not 0 <= validation_fraction < 1:
        raise RequestError(
            "data.validation",
            what="the validation fraction is a share of the documents",
            found=str(validation_fraction),
            wanted="at least 0 and less than 1",
        )
    num_held_out = 0
    if validation_fraction > 0:
        if corpus.num_documents < 2:
            raise RequestError(
                "data.validation",
                what="validation holds out whole documents, and the last one must train",
                found="1 document",
                wanted="at least 2",
                where=str(corpus.path),
                next_step="hold nothing out with --set data.validation=0, or add documents",
            )
        wanted = max(1, round(validation_fraction * corpus.num_documents))
        num_held_out = min(wanted, corpus.num_documents - 1)
    held_out = (2 * np.arange(num_held_out) + 1) * corpus.num_documents // (2 * num_held_out or 1)
    held_starts = np.asarray(corpus.offsets[held_out], dtype=np.int64)
    held_ends = np.asarray(corpus.offsets[held_out + 1], dtype=np.int64)
    training = _runs(
        corpus,
        starts=np.concatenate([[0], held_ends]),
        ends=np.concatenate([held_starts, [corpus.num_tokens]]),
    )
    return training, _runs(corpus, starts=held_starts, ends=held_ends)


def _runs(corpus: TokenCorpus, *, starts: Ids, ends: Ids) -> Split:
    kept = ends > starts
    lengths = (ends - starts)[kept]
    positions = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Split(corpus=corpus, starts=starts[kept], positions=positions)
