"""R27: whatever is wrong with a corpus folder is named before it is read."""

import hashlib
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pith.data.corpus import TokenCorpus
from pith.data.shards import token_dtype
from pith.errors import RequestError

TEXTS = ["first", "second one", "", "thïrd", "4"]
KEPT = [text for text in TEXTS if text]
TOKENS = "tokens-00001.bin"  # of three: "second one" alone


@pytest.fixture
def folder(make_corpus) -> Path:
    return make_corpus(TEXTS, tokens_per_file=11).path


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))


def sign(folder: Path, name: str) -> None:
    """Makes the manifest agree with what a file now holds, in all but its meaning."""
    content = (folder / name).read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["token_files"] + manifest["other_files"]:
            if entry["name"] == name:
                entry["size_bytes"] = len(content)
                entry["sha256"] = hashlib.sha256(content).hexdigest()

    change_manifest(folder, change)


def refusal(folder: Path, *, verify: bool = True) -> str:
    with pytest.raises(RequestError) as caught:
        TokenCorpus.open(folder, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.next_step
    return message


def test_documents_come_back_from_the_offsets(make_corpus) -> None:
    for tokens_per_file in (1, 11, 1000):
        corpus = make_corpus(TEXTS, name=f"c{tokens_per_file}", tokens_per_file=tokens_per_file)
        documents = [corpus.document(k).tolist() for k in range(corpus.num_documents)]
        assert documents == [[*text.encode(), 256] for text in KEPT]
        assert corpus.read(0, corpus.num_tokens).tolist() == [*chain(*documents)]
        assert corpus.read(3, 3).size == 0


def test_the_type_of_tokens_follows_the_vocabulary() -> None:
    assert [token_dtype(n) for n in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_a_model_with_a_smaller_vocabulary_is_refused(make_corpus) -> None:
    corpus = make_corpus(TEXTS)
    corpus.check_vocabulary(257)
    with pytest.raises(RequestError, match=r"found 257 ids \(bytes\); wanted at most 256"):
        corpus.check_vocabulary(256)


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, "offsets.bin", "rejected.jsonl"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{folder / name}: the " in refusal(folder, verify=False)


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, "offsets.bin", "rejected.jsonl"])
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_file_cut_short_is_named(folder: Path, name: str, keep: int) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.rstrip()[:keep])
    message = refusal(folder, verify=False)
    assert str(folder / name) in message
    if name != "manifest.json":
        assert f"wanted {len(content)} bytes" in message


@pytest.mark.parametrize("name", ["manifest.json", TOKENS, "offsets.bin", "rejected.jsonl"])
def test_flipped_bytes_are_found(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for position in range(0, len(content), 5 if name == "manifest.json" else 1):
        changed = bytearray(content)
        changed[position] ^= 1
        (folder / name).write_bytes(changed)
        if name == "manifest.json" and json_equal(content, bytes(changed)):
            continue
        assert "corpus" in refusal(folder)


def json_equal(a: bytes, b: bytes) -> bool:
    """A change of the layout, or of what nothing else on disk can confirm."""
    try:
        changed = json.loads(b)
    except ValueError:
        return False
    original = json.loads(a)
    free = {"num_rejected": 0, "vocab_size": 0}
    return {**changed, **free} == {**original, **free} and changed["vocab_size"] >= 257


def test_an_odd_byte_count_is_refused_even_if_the_manifest_says_the_same(folder: Path) -> None:
    with (folder / TOKENS).open("ab") as file:
        file.write(b"x")
    sign(folder, TOKENS)
    message = refusal(folder, verify=False)
    assert f"{folder / TOKENS}: the size is not 11 tokens of 2 bytes" in message
    assert "found 23 bytes; wanted 22 bytes" in message


def test_an_id_outside_the_vocabulary_is_named_with_its_position(folder: Path) -> None:
    tokens = np.fromfile(folder / TOKENS, dtype="<u2")
    tokens[7] = 257
    tokens.tofile(folder / TOKENS)
    sign(folder, TOKENS)
    message = refusal(folder)
    assert f"{folder / TOKENS}: token 7 is outside the vocabulary" in message
    assert "found 257; wanted less than 257" in message


def test_a_document_that_does_not_end_is_named(folder: Path) -> None:
    tokens = np.fromfile(folder / TOKENS, dtype="<u2")
    tokens[-1] = 65
    tokens.tofile(folder / TOKENS)
    sign(folder, TOKENS)
    message = refusal(folder)
    assert f"{folder / TOKENS}: document 1 does not end with" in message
    assert "at token 10; found 65; wanted 256" in message


@pytest.mark.parametrize(
    ("position", "value", "says"),
    [
        (2, -1, "offset 2 does not follow the one before; found -1; wanted more than 6"),
        (2, 6, "offset 2 does not follow the one before; found 6; wanted more than 6"),
        (2, 25, "offset 3 does not follow the one before; found 24; wanted more than 25"),
        (0, 1, "offset 0 is wrong; found 1; wanted 0"),
        (4, 27, "offset 4 is wrong; found 27; wanted 26"),
    ],
)
def test_wrong_offsets_are_named(folder: Path, position: int, value: int, says: str) -> None:
    offsets = np.fromfile(folder / "offsets.bin", dtype="<i8")
    assert offsets.tolist() == [0, 6, 17, 24, 26]
    offsets[position] = value
    offsets.tofile(folder / "offsets.bin")
    sign(folder, "offsets.bin")
    assert f"{folder / 'offsets.bin'}: {says}" in refusal(folder, verify=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "uint32"}, "dtype contradicts the rest; found uint32; wanted uint16"),
        ({"dtype": "float32"}, "damaged at dtype"),
        ({"vocab_size": "257"}, "damaged at vocab_size"),
        ({"vocab_size": 256}, "end_of_document is outside the vocabulary; found 256"),
        ({"num_tokens": 25}, "num_tokens contradicts the rest; found 25; wanted 26"),
        ({"num_documents": 3}, "the size is not that of 3 documents"),
        ({"num_documents": -1}, "damaged at num_documents"),
        ({"tokenizer_fingerprint": "0"}, "tokenizer_fingerprint contradicts the rest"),
        ({"tokenizer": "other"}, "tokenizer_fingerprint contradicts the rest"),
        ({"format": "pith/tokens/2"}, "damaged at format"),
        ({"surprise": 1}, "damaged at surprise"),
        ({"token_files": []}, "damaged at token_files"),
        ({"other_files": []}, "other_files contradicts the rest; found no offsets"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(folder: Path, change, says: str) -> None:
    change_manifest(folder, lambda manifest: manifest.update(change))
    assert says in refusal(folder, verify=False)


@pytest.mark.parametrize("name", ["../tokens-00000.bin", "/etc/hosts", "a/b.bin", ".", "x.bin\n"])
def test_a_name_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    change_manifest(folder, lambda manifest: manifest["token_files"][0].update(name=name))
    assert "damaged at token_files.0.name" in refusal(folder, verify=False)


def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    assert "no such corpus folder" in refusal(tmp_path / "absent")
    assert "the manifest is missing" in refusal(tmp_path)


def test_the_fingerprint_changes_with_the_content(make_corpus) -> None:
    first, same, other = (
        make_corpus(texts, name=name).fingerprint
        for name, texts in (("a", TEXTS), ("b", TEXTS), ("c", [*TEXTS, "more"]))
    )
    assert first == same != other
