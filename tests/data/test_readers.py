"""P06: every kind of file is read or refused by name; a bad line is named with its place."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from pith.data.corpus import TokenCorpus
from pith.data.readers import SUFFIXES, read_records
from pith.data.tokenize import Tokenized, tokenize
from pith.errors import RequestError

BROKEN = Path(__file__).parents[1] / "broken" / "data"

BAD_LINES = {
    "array.jsonl": "a JSON array where an object was expected",
    "bare-string.jsonl": "a JSON string where an object was expected",
    "deep.jsonl": "not readable as JSON",
    "half-surrogate.jsonl": "the text holds half of a surrogate pair",
    "invalid-utf8.jsonl": "invalid UTF-8 at byte 13",
    "long-line.jsonl": "not JSON (Unterminated string starting at), at character 10",
    "long-number.jsonl": "not readable as JSON",
    "missing-key.jsonl": "no key 'text'; there are: 'body', 'title'",
    "not-json.jsonl": "not JSON (Expecting value), at character 1",
    "null.jsonl": "'text' is a null, not a text",
    "number.jsonl": "'text' is a number, not a text",
    "stray-mark.jsonl": "not JSON",
    "truncated-line.jsonl": "not JSON (Unterminated string starting at), at character 10",
    "two-objects.jsonl": "more than one JSON value on the line, at character 15",
}

LINES = b'{"text": "one"}\n{"text": "two", "n": 1}\n{"text": "thr\\u00e9e"}\n'
TEXTS = ["one", "two", "thrée"]


def run(out: Path, *inputs: Path, **options: object) -> Tokenized:
    return tokenize([str(path) for path in inputs], out=out, workers=1, **options)


def texts_of(out: Path) -> list[str]:
    corpus = TokenCorpus.open(out)
    documents = (corpus.document(k) for k in range(corpus.num_documents))
    return [bytes(tokens[:-1].tolist()).decode() for tokens in documents]


def refusal(out: Path, *inputs: Path, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        run(out, *inputs, **options)
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_broken_file_has_an_expectation() -> None:
    assert sorted(BAD_LINES) == sorted(path.name for path in BROKEN.glob("*.jsonl"))


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_with_its_place_and_its_start(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path / "out", BROKEN / name)
    assert message.startswith(f"{BROKEN / name}:2: {BAD_LINES[name]}")
    line = (BROKEN / name).read_bytes().split(b"\n")[1].decode(errors="replace")
    assert f"found {line[:80]!r}" in message
    assert "--on-bad-line skip" in message


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_skipped_counted_and_listed_on_request(tmp_path: Path, name: str) -> None:
    done = run(tmp_path / "out", BROKEN / name, max_bad_lines=1)
    assert texts_of(done.path) == ["good", "good"]
    assert (done.documents_in, done.documents_out, done.num_bad) == (3, 2, 1)
    assert done.rejected[0]["where"] == f"{BROKEN / name}:2"
    assert done.rejected[0]["reason"].startswith(BAD_LINES[name])


def test_more_bad_lines_than_allowed_stop_at_the_first_too_many(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "good"}\nbad\nbad\nbad\n')
    assert f"{source}:4: " in refusal(tmp_path / "out", source, max_bad_lines=2)
    assert run(tmp_path / "out", source, max_bad_lines=3).num_bad == 3


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip(b"\n"),
        LINES.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + LINES,
        b"\n \n" + LINES.replace(b"\n", b"\n\n\t\r\n"),
    ],
    ids=["plain", "no-last-newline", "crlf", "byte-order-mark", "blank-lines"],
)
def test_line_ends_marks_and_blank_lines_change_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    done = run(tmp_path / "out", tmp_path / "a.jsonl")
    assert texts_of(done.path) == TEXTS
    assert done.documents_in == 3


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + LINES + b"\nbad\n")
    assert f"{tmp_path / 'a.jsonl'}:7: " in refusal(tmp_path / "out", tmp_path / "a.jsonl")


def test_compressed_files_are_read_whole(tmp_path: Path) -> None:
    parts = [LINES[:20], LINES[20:]]  # two members, cut within a line
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    assert texts_of(run(tmp_path / "out", tmp_path / "a.jsonl.gz").path) == TEXTS
    assert texts_of(run(tmp_path / "out2", tmp_path / "b.jsonl.zst").path) == TEXTS


@pytest.mark.parametrize(
    ("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)]
)
def test_a_compressed_file_cut_anywhere_is_an_error(tmp_path: Path, name: str, pack) -> None:
    file, whole = tmp_path / name, pack(LINES)
    for keep in range(len(whole)):
        file.write_bytes(whole[:keep])
        with pytest.raises(RequestError, match=f"{file}: the file is cut short or damaged"):
            list(read_records(file, text_key="text"))
    assert str(file) in refusal(tmp_path / "out", file, max_bad_lines=100)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    assert "damaged after" in refusal(tmp_path / "out", tmp_path / name)


def parquet(path: Path, column: pyarrow.Array, *, name: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({name: column, "n": [0] * len(column)}), path)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_parquet_rows_are_documents_and_null_rows_are_bad(tmp_path: Path, kind: str) -> None:
    values: list[str | None] = ["one", None, "two", "", "thrée"]
    plain = pyarrow.array(values, pyarrow.string())
    column = plain.dictionary_encode() if kind == "dictionary" else plain.cast(kind)
    source = parquet(tmp_path / "a.parquet", column)
    message = refusal(tmp_path / "out", source)
    assert f"{source}:2: text is null" in message
    done = run(tmp_path / "out", source, max_bad_lines=1)
    assert texts_of(done.path) == TEXTS
    assert (done.documents_in, done.num_empty, done.num_bad) == (5, 1, 1)


def test_a_parquet_file_without_a_text_column_is_refused(tmp_path: Path) -> None:
    numbers = parquet(tmp_path / "a.parquet", pyarrow.array([1, 2]))
    assert "column 'text' is int64, not text" in refusal(tmp_path / "out", numbers)
    other = parquet(tmp_path / "b.parquet", pyarrow.array(["x"]), name="body")
    assert "no column 'text'; there are: body, n" in refusal(tmp_path / "out", other)
    assert texts_of(run(tmp_path / "out", other, text_key="body").path) == ["x"]
    lists = parquet(tmp_path / "c.parquet", pyarrow.array([["x"], ["y"]]))
    assert "column 'text' is list<element: string>, not text" in refusal(tmp_path / "no", lists)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfline one\r\nline two\n\n{not json}")
    done = run(tmp_path / "out", tmp_path / "a.txt")
    assert texts_of(done.path) == ["line one\r\nline two\n\n{not json}"]
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    assert "invalid UTF-8 at byte 11 in line 3" in refusal(tmp_path / "out2", tmp_path / "b.txt")


def test_a_folder_means_its_files_sorted_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    for name in ("c.txt", "a.txt", "b/z.txt", ".hidden"):
        (folder / name).write_text(name)
    assert texts_of(run(tmp_path / "out", folder).path) == ["a.txt", "b/z.txt", "c.txt"]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.txt.gz", "a.jsonl.bz2", "jsonl"])
def test_other_kinds_of_file_are_refused_with_the_list(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(LINES)
    for path in (tmp_path / "in" / name, tmp_path / "in"):
        message = refusal(tmp_path / "out", path)
        assert f"found {name}" in message
        assert all(suffix in message for suffix in SUFFIXES)


def test_what_is_not_there_or_only_points_elsewhere_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "out", tmp_path / "absent.txt")
    pointer = tmp_path / "a.jsonl"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS pointer" in refusal(tmp_path / "out", pointer)
    for name in ("A" * 300, "a\0b.txt", "a/" * 3000):
        assert "no such file" in refusal(tmp_path / "out", name)


def test_a_file_that_may_not_be_read_is_a_wrong_request(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refusal(tmp_path / "out", tmp_path / "a.txt")


def test_an_empty_name_does_not_mean_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    with pytest.raises(RequestError, match="empty name"):
        tokenize([""], out=tmp_path / "out", workers=1)
