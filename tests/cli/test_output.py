"""Data on stdout, words on stderr, files whole or not at all."""

import json
import os
import threading

import pytest

from pith.cli import output
from pith.errors import Fault, RequestError
from pith.report import Report


def test_json_is_the_only_thing_on_stdout_and_text_goes_to_stderr_as_it_is(capsys):
    text = "loss [bold]5.5[/bold] :smile: " + "x" * 200
    report = Report("train", data={"b": float("nan"), "a": 1})

    output.emit(report, json=True, out=None, text=text)

    stdout, stderr = capsys.readouterr()
    assert stderr == text + "\n"
    assert stdout.count("\n") == 1
    assert json.loads(stdout)["data"] == {"a": 1, "b": None}
    assert stdout.index('"a": 1') < stdout.index('"b": null')


def test_without_json_stdout_stays_empty(capsys):
    output.emit(Report("train"), json=False, out=None, text="done")

    assert capsys.readouterr().out == ""


def test_out_receives_the_same_json_and_replaces_what_was_there(capsys, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")

    output.emit(Report("train"), json=True, out=path, text="")

    assert path.read_text() == capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_refused_before_and_while_writing(tmp_path):
    for path in (tmp_path / "none" / "report.json", tmp_path):
        with pytest.raises(RequestError, match="cannot be written"):
            output.check_out(path)
        with pytest.raises(RequestError, match="cannot be written"):
            output.write_whole(path, text="x")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_be_written_passes_the_check(tmp_path):
    output.check_out(tmp_path / "report.json")
    output.check_out(None)

    assert list(tmp_path.iterdir()) == []


def test_every_fault_gets_a_line_of_its_own():
    faults = (Fault("a.b", "1", "2", ("2",)), Fault("c", "x", "y"))
    error = RequestError("x", what="2 faults", faults=faults)

    assert output.error_text(error).splitlines() == [
        "error: 2 faults",
        "  a.b: found 1, wanted 2 (nearest valid: 2)",
        "  c: found x, wanted y",
    ]


def test_the_report_of_a_failure_reaches_the_file_too(tmp_path):
    path = tmp_path / "report.json"

    with (
        pytest.raises(RequestError),
        output.failure_to(path, verb="train"),
    ):
        raise RequestError("x.y", what="no", next_step="pith recipe list")

    report = json.loads(path.read_text())
    assert (report["verb"], report["exit"], report["next"]) == ("train", 2, ["pith recipe list"])


def test_a_symlink_stays_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    for content in ("first", "second"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        output.check_out(link)
        output.write_whole(link, text=content)

        assert link.is_symlink()
        assert target.read_text() == content
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_fifo_stays_and_its_reader_gets_the_text(tmp_path):
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()))
    reader.start()

    output.check_out(fifo)
    output.write_whole(fifo, text="x")

    reader.join(timeout=10)
    assert received == ["x"]
    assert fifo.is_fifo()


@pytest.mark.parametrize("name", ["n" * 300, "n/" * 3000])
def test_a_name_too_long_is_refused_before_and_while_writing(tmp_path, name):
    for write in (output.check_out, lambda path: output.write_whole(path, text="x")):
        with pytest.raises(RequestError, match="cannot be written there; found File name too long"):
            write(tmp_path / name)


def test_the_longest_name_that_the_file_system_takes_is_written(tmp_path):
    path = tmp_path / ("n" * 255)

    output.check_out(path)
    output.write_whole(path, text="x")

    assert path.read_text() == "x"
