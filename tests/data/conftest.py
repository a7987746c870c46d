"""Small corpora, made by the production code from texts the tests choose."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pith.data.corpus import TokenCorpus
from pith.data.tokenize import tokenize

MakeCorpus = Callable[..., TokenCorpus]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def make_corpus(tmp_path: Path) -> MakeCorpus:
    """make_corpus(texts, tokens_per_file=...) -> an opened corpus of bytes."""

    def make(texts: Sequence[str], *, name: str = "corpus", tokens_per_file: int = 1 << 30):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        out = tmp_path / name
        tokenize([str(source)], out=out, workers=1, tokens_per_file=tokens_per_file)
        return TokenCorpus.open(out)

    return make


@pytest.fixture
def write_texts(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """write_texts(texts) -> a .jsonl file of them."""
    return lambda texts: write_jsonl(tmp_path / "texts.jsonl", texts)
