"""`pith tokenize` as people and programs meet it."""

import json
from pathlib import Path

import pytest

from pith.cli.app import run


def pith(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = run(["tokenize", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": " "}\nbad\n{"text": "two"}\n')
    return file


def test_the_report_accounts_for_every_document(capsys, tmp_path, source) -> None:
    out = tmp_path / "out"
    words = (source, "--out", out, "--workers", 1, "--on-bad-line", "skip", "--json")
    status, stdout, stderr = pith(capsys, *words)
    assert status == 0
    report = json.loads(stdout)
    data = report["data"]
    assert (report["verb"], report["ok"]) == ("tokenize", True)
    assert (data["documents_in"], data["documents_out"], data["rejected"]) == (4, 2, 2)
    assert (data["tokens"], data["path"]) == (8, str(out))
    assert set(data["files"]) == {file.name for file in out.iterdir()}
    assert [entry["where"] for entry in data["rejections"]] == [f"{source}:2", f"{source}:3"]
    assert "4 documents in = 2 out + 1 empty + 1 bad" in stderr
    assert f"{source}:3: not JSON" in stderr


def test_a_bad_line_exits_2_with_one_line_and_makes_nothing(capsys, tmp_path, source) -> None:
    out = tmp_path / "out"
    status, stdout, stderr = pith(capsys, source, "--out", out, "--workers", 1)
    assert (status, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert f"{source}:3: not JSON" in stderr
    assert "found 'bad'" in stderr
    assert not out.exists()
    status, _, stderr = pith(
        capsys, source, "--out", out, "--workers", 1, "--on-bad-line", "skip", "--max-bad-lines", 0
    )
    assert status == 2
    assert not out.exists()


def test_options_reach_the_work(capsys, tmp_path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"body": "x"}\n')
    out = tmp_path / "out"
    status, _, stderr = pith(capsys, source, "--out", out, "--tokenizer", tmp_path / "no.json")
    assert status == 2
    assert "no such tokenizer file" in stderr
    status, _, stderr = pith(capsys, source, "--out", out, "--eod", "</s>")
    assert status == 2
    assert "--eod" in stderr
    status, _, _ = pith(capsys, source, "--out", out, "--text-key", "body", "--workers", 1)
    assert status == 0
    status, _, stderr = pith(capsys, source, "--out", out, "--on-bad-line", "ignore")
    assert status == 2
    assert "ignore" in stderr
