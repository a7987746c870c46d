"""Batches against a plain list of tokens, and what must not change them."""

import threading

import numpy as np
import pytest

from pith.data.corpus import TokenCorpus
from pith.data.loader import Loader
from pith.data.split import split_documents
from pith.errors import RequestError
from pith.ops.cross_entropy import NOT_COUNTED

TEXTS = [f"document {k} " + "abcdefghij"[: k % 10] * (k % 4) for k in range(40)]
END = 256


def loader_of(corpus: TokenCorpus, **changes: object) -> Loader:
    settings: dict[str, object] = {
        "sequence_length": 8,
        "global_batch_size": 4,
        "seed": 3,
        "validation_fraction": 0.1,
    }
    return Loader(corpus, **(settings | changes))


def tokens_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), END)]


HELD_OUT = [5, 15, 25, 35]  # 4 of 40, evenly spaced


@pytest.mark.parametrize("tokens_per_file", [1 << 30, 50, 1])
def test_samples_are_windows_of_the_documents_that_train(make_corpus, tokens_per_file) -> None:
    corpus = make_corpus(TEXTS, tokens_per_file=tokens_per_file)
    loader = loader_of(corpus)
    sides = (
        ([k for k in range(40) if k not in HELD_OUT], loader.batch(0), loader.num_train_samples),
        (HELD_OUT, loader.validation(5), loader.num_validation_samples),
    )
    for documents, batch, num_samples in sides:
        tokens = tokens_of([TEXTS[k] for k in documents])
        assert num_samples == (len(tokens) - 1) // 8
        for row, sample in enumerate(batch.sample_ids.tolist()):
            window = tokens[sample * 8 : sample * 8 + 9]
            assert batch.tokens_NS[row].tolist() == window[:-1]
            assert batch.labels_NS[row].tolist() == window[1:]


def test_an_epoch_reads_every_training_token_once_and_no_held_out_one(make_corpus) -> None:
    texts = [chr(ord("a") + k) * 7 for k in range(20)]  # 8 tokens each: windows are documents
    loader = loader_of(make_corpus(texts), global_batch_size=1, validation_fraction=0.1)
    seen = np.concatenate([loader.batch(k).labels_NS[0] for k in range(loader.num_train_samples)])
    assert loader.num_train_samples == 17  # 18 documents; the last window has no token after it
    assert not {ord("a") + 5, ord("a") + 15} & set(seen.tolist())
    assert np.bincount(seen, minlength=257)[END] == 17


def test_labels_across_document_ends_are_not_counted_when_masked(make_corpus) -> None:
    corpus = make_corpus(TEXTS, tokens_per_file=50)
    plain = loader_of(corpus).batch(2)
    masked = loader_of(corpus, packing="mask").batch(2)
    assert (masked.tokens_NS == plain.tokens_NS).all()
    after_end = plain.tokens_NS == END
    assert after_end.any()
    assert (masked.labels_NS[after_end] == NOT_COUNTED).all()
    assert (masked.labels_NS[~after_end] == plain.labels_NS[~after_end]).all()


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, 1), (0.1, 4), (0.5, 20), (0.99, 39)])
def test_every_document_is_on_one_side(make_corpus, fraction: float, held_out: int) -> None:
    corpus = make_corpus(TEXTS)
    training, validation = split_documents(corpus, validation_fraction=fraction)
    assert training.num_tokens + validation.num_tokens == corpus.num_tokens
    sides = [split.window(0, split.num_tokens) for split in (training, validation)]
    assert [int(first.sum()) for _, first in sides] == [40 - held_out, held_out]
    both = [
        bytes(piece.tolist())
        for tokens, first in sides
        for piece in np.split(tokens % END, np.flatnonzero(first)[1:])
    ]
    assert sorted(both) == sorted(text.encode() + b"\0" for text in TEXTS)


def test_without_validation_everything_trains(make_corpus) -> None:
    corpus = make_corpus(["one document only"])
    loader = loader_of(corpus, validation_fraction=0, global_batch_size=1)
    assert (loader.num_train_samples, loader.num_validation_samples) == (2, 0)
    with pytest.raises(RequestError, match="1 document; wanted at least 2"):
        loader_of(corpus, validation_fraction=0.1)
    with pytest.raises(RequestError, match=r"found 1.0; wanted at least 0"):
        loader_of(corpus, validation_fraction=1.0)


def test_r14_sample_ids_are_the_same_for_every_world_and_after_every_stop(make_corpus) -> None:
    corpus = make_corpus(TEXTS)
    loader = loader_of(corpus, global_batch_size=8)
    steps = 3 * loader.num_train_samples // 8
    wanted = [loader.batch(8 * step).sample_ids.tolist() for step in range(steps)]
    stops = np.random.default_rng(0).integers(1, steps, size=4).tolist()
    for world in (1, 2, 4):
        seen: list[list[int]] = []
        for first, last in zip([0, *sorted(stops)], [*sorted(stops), steps], strict=True):
            again = loader_of(corpus, global_batch_size=8)
            share = 8 // world
            ranks = [slice(rank * share, (rank + 1) * share) for rank in range(world)]
            streams = [
                [again.batch(8 * step, rows=rows) for step in range(first, last)] for rows in ranks
            ]
            seen += [
                [sample for part in parts for sample in part.sample_ids.tolist()]
                for parts in zip(*streams, strict=True)
            ]
        assert seen == wanted
    flat = [sample for batch in wanted for sample in batch]
    n = loader.num_train_samples
    assert sorted(flat[:n]) == sorted(flat[n : 2 * n]) == list(range(n))


def test_the_stream_does_not_depend_on_the_batch_size(make_corpus) -> None:
    corpus = make_corpus(TEXTS)
    streams = []
    for size in (1, 3, 4, 12):
        loader = loader_of(corpus, global_batch_size=size)
        batches = [loader.batch(first) for first in range(0, 48, size)]
        streams.append(np.concatenate([batch.tokens_NS for batch in batches]))
    assert all((stream == streams[0]).all() for stream in streams)


def test_a_batch_size_changed_on_the_way_goes_on_at_the_same_sample(make_corpus) -> None:
    corpus = make_corpus(TEXTS)
    with loader_of(corpus, global_batch_size=3).stream(0, 4) as batches:
        ids = [sample for batch in batches for sample in batch.sample_ids.tolist()]
    with loader_of(corpus, global_batch_size=4).stream(12, 3) as batches:
        ids += [sample for batch in batches for sample in batch.sample_ids.tolist()]
    assert ids == loader_of(corpus, global_batch_size=24).sample_ids(0).tolist()


def test_p08_epochs_after_a_resume_are_those_of_the_uninterrupted_run(make_corpus) -> None:
    corpus = make_corpus(["x" * 40, "y" * 39])
    settings = {"validation_fraction": 0.0, "global_batch_size": 1}
    loader = loader_of(corpus, **settings)
    assert loader.num_train_samples == 10
    whole = [int(loader.batch(step).sample_ids[0]) for step in range(25)]
    for stop in range(1, 25):
        with loader_of(corpus, **settings).stream(0, stop) as batches:
            before = [int(batch.sample_ids[0]) for batch in batches]
        with loader_of(corpus, **settings).stream(stop, 25 - stop) as batches:
            after = [int(batch.sample_ids[0]) for batch in batches]
        assert before + after == whole
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]


def test_p07_a_corpus_smaller_than_a_batch_is_refused_with_both_numbers(make_corpus) -> None:
    three = make_corpus(["x" * 24], name="three")  # 25 tokens: 3 windows of 8 + 1
    loader = loader_of(three, validation_fraction=0, global_batch_size=4)
    with pytest.raises(RequestError, match=r"found 3 training .*; wanted at least 4") as caught:
        loader.check(1)
    assert "\n" not in str(caught.value)
    none = loader_of(make_corpus(["x"], name="none"), validation_fraction=0, global_batch_size=1)
    with pytest.raises(RequestError, match=r"found 0 training .*; wanted at least 1"):
        none.check(1)


def test_p07_exactly_one_batch_trains_and_one_sample_more_needs_another_epoch(make_corpus) -> None:
    four = make_corpus(["x" * 32])
    settings = {"validation_fraction": 0, "global_batch_size": 4}
    loader_of(four, epochs=1, **settings).check(1)
    with pytest.raises(RequestError, match=r"found 4 sequences in 1 epochs.*; wanted 8"):
        loader_of(four, epochs=1, **settings).check(2)
    loader_of(four, epochs=2, **settings).check(2)
    loader_of(four, epochs=2, **settings).check(1, first_sample=4)
    with pytest.raises(RequestError, match=r"found 8 sequences in 2 epochs.*; wanted 12"):
        loader_of(four, epochs=2, **settings).check(2, first_sample=4)
    loader_of(four, epochs=None, **settings).check(1000)
    with pytest.raises(RequestError, match=r"found 0 sequences .*; wanted at least 1"):
        loader_of(four, **settings).check(1, num_validation_sequences=1)


def test_the_stream_is_the_batches_read_on_one_thread_that_ends(make_corpus) -> None:
    loader = loader_of(make_corpus(TEXTS))
    before = threading.active_count()
    with loader.stream(2 * 4, 5, rows=slice(1, 3)) as batches:
        streamed = list(batches)
    with loader.stream(0, 1000) as batches:
        next(batches)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    wanted = [loader.batch(4 * step, rows=slice(1, 3)) for step in range(2, 7)]
    assert len(streamed) == 5
    for got, want in zip(streamed, wanted, strict=True):
        assert (got.tokens_NS == want.tokens_NS).all()
        assert (got.sample_ids == want.sample_ids).all()


def test_a_failure_on_the_thread_surfaces_where_the_batch_is_taken(
    make_corpus, monkeypatch
) -> None:
    loader = loader_of(make_corpus(TEXTS))
    read, calls = TokenCorpus.read, []

    def failing(self: TokenCorpus, start: int, stop: int):
        calls.append(start)
        if len(calls) > 10:  # in the third batch
            raise OSError(5, "Input/output error")
        return read(self, start, stop)

    monkeypatch.setattr(TokenCorpus, "read", failing)
    before = threading.active_count()
    taken = []
    with pytest.raises(OSError, match="Input/output"), loader.stream(0, 10) as batches:
        taken += batches
    assert threading.active_count() == before


def test_reading_leaves_the_corpus_folder_as_it_was(make_corpus) -> None:
    corpus = make_corpus(TEXTS)

    def state() -> dict[str, tuple[bytes, int]]:
        files = sorted(corpus.path.iterdir())
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before = state()
    loader = loader_of(corpus)
    batch = loader.batch(0)
    batch.tokens_NS[:] = 0  # the caller's own copy
    loader.validation(2)
    assert state() == before
