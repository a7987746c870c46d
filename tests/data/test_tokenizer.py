"""Tokenizers say what they are, know how a document ends, and lose no text."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from pith.data.corpus import TokenCorpus
from pith.data.tokenize import tokenize
from pith.data.tokenizer import END_TOKENS, ByteTokenizer, open_tokenizer
from pith.errors import RequestError

TEXTS = ["the cat sat on the mat", "a naïve 猫", "say <|endoftext|> aloud", "x" * 100]


def save(path: Path, *special: str, vocab_size: int = 300) -> Path:
    """A byte-level BPE tokenizer with settings for prompts that must not touch a corpus."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return save(tmp_path / "tokenizer.json", "<|im_end|>", "<|endoftext|>")


def test_bytes_are_utf8_and_one_end() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXTS)
    assert [piece.tolist() for piece in ids] == [list(text.encode()) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode(np.append(ids[1], 256)) == TEXTS[1]
    with pytest.raises(RequestError, match="has its own end token"):
        open_tokenizer("bytes", end_token="</s>")


def test_a_file_encodes_whole_texts_and_never_an_end_within(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode(TEXTS)
    assert all(tokenizer.end_of_document not in piece for piece in ids)
    assert [tokenizer.decode(piece) for piece in ids] == TEXTS
    assert len(ids[0]) < len(TEXTS[0])  # merges were used
    assert max(piece.max() for piece in ids) < tokenizer.vocab_size


def test_the_first_known_end_token_is_taken_unless_one_is_named(tokenizer_file: Path) -> None:
    vocabulary = json.loads(tokenizer_file.read_text())["model"]["vocab"]
    for named, wanted in ((None, "<|endoftext|>"), ("<|im_end|>", "<|im_end|>"), ("cat", "cat")):
        if wanted in vocabulary:
            tokenizer = open_tokenizer(str(tokenizer_file), end_token=named)
            assert tokenizer.end_of_document == vocabulary[wanted]
    with pytest.raises(RequestError, match="has no token '<eot>'"):
        open_tokenizer(str(tokenizer_file), end_token="<eot>")


def test_p05_a_tokenizer_without_an_end_token_is_refused_at_start(tmp_path: Path) -> None:
    file = save(tmp_path / "tokenizer.json", "<unk>")
    with pytest.raises(RequestError) as caught:
        tokenize([str(tmp_path / "absent.txt")], out=tmp_path / "out", tokenizer=str(file))
    message = str(caught.value)
    assert f"{file}: this tokenizer has no token known to end a document" in message
    assert "--eod NAME" in message
    assert all(name in message for name in END_TOKENS)
    assert open_tokenizer(str(file), end_token="<unk>").end_of_document == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        ("", "not a tokenizer"),
        ("{}", "not a tokenizer"),
        ('{"model": {"type": "Nothing"}}', "not a tokenizer"),
        (None, "no such tokenizer file"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content, says: str) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError, match=says) as caught:
        open_tokenizer(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens_count_and_choose_the_type_of_the_files(tmp_path: Path, write_texts) -> None:
    source = str(write_texts(TEXTS))
    for size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        file = save(tmp_path / f"{size}.json", "</s>")
        content = json.loads(file.read_text())
        last = {**content["added_tokens"][0], "id": size - 1, "content": "<last>"}
        for token in range(len(content["model"]["vocab"]), size - 1):
            content["model"]["vocab"][f"unused {token}"] = token
        content["added_tokens"].append(last)
        file.write_text(json.dumps(content))
        out = tmp_path / f"out-{size}"
        tokenize([source], out=out, tokenizer=str(file), end_token="<last>", workers=1)
        corpus = TokenCorpus.open(out)
        assert (corpus.manifest.dtype, corpus.manifest.vocab_size) == (dtype, size)
        assert corpus.document(0)[-1] == size - 1
        assert corpus.manifest.num_tokens * int(dtype[4:]) // 8 == sum(
            entry.size_bytes for entry in corpus.manifest.token_files
        )


def test_the_corpus_keeps_its_tokenizer_and_notices_another(
    tmp_path: Path, tokenizer_file: Path, write_texts
) -> None:
    out = tmp_path / "out"
    tokenize([str(write_texts(TEXTS))], out=out, tokenizer=str(tokenizer_file), workers=1)
    corpus = TokenCorpus.open(out)
    kept = open_tokenizer(str(out / "tokenizer.json"))
    assert kept.fingerprint == corpus.manifest.tokenizer_fingerprint
    assert [kept.decode(corpus.document(k)) for k in range(len(TEXTS))] == TEXTS
    content = (out / "tokenizer.json").read_text()
    (out / "tokenizer.json").write_text(content.replace("cat", "dog"))
    with pytest.raises(RequestError, match=r"tokenizer.json: the content is not what was written"):
        TokenCorpus.open(out)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_the_tokenizer_cannot_encode_is_named(
    tmp_path: Path, write_texts, workers: int
) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "</s>": 2}, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    source = write_texts(["the cat", " ", "the", "a dog", "the"])
    with pytest.raises(RequestError, match=f"{source}:4: .*words.json.*UNK") as caught:
        tokenize(
            [str(source)],
            out=tmp_path / "out",
            tokenizer=str(tmp_path / "words.json"),
            workers=workers,
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["A" * 300, "a\0b", "a/" * 3000, "", "."])
def test_a_name_that_can_be_no_file_is_no_tokenizer(name: str) -> None:
    with pytest.raises(RequestError, match="no such tokenizer file"):
        open_tokenizer(name)
