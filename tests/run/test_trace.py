"""The trace gives back what each rank ran, and says so when it cannot."""

import pytest

from pith.errors import RequestError
from pith.run.trace import read_trace, write_trace

ROWS = ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0|F1.1 B1.1")


@pytest.fixture
def folder(tmp_path):
    for rank in (1, 0):
        write_trace(tmp_path / "trace", rank, (ROWS[rank], f"{ROWS[rank]} W0.0"))
    return tmp_path / "trace"


def test_rows_come_back_by_rank_and_step(folder):
    assert read_trace(folder) == ROWS
    assert read_trace(folder, step=1) == tuple(f"{row} W0.0" for row in ROWS)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.txt", "rank-00001.txt"]


def test_a_rank_that_ran_nothing_has_an_empty_row(tmp_path):
    write_trace(tmp_path, 0, ("",))
    assert read_trace(tmp_path) == ("",)


def test_no_trace_is_an_error(tmp_path):
    with pytest.raises(RequestError, match="no rank"):
        read_trace(tmp_path / "nowhere")


def test_a_missing_rank_is_an_error(folder):
    (folder / "rank-00000.txt").unlink()
    with pytest.raises(RequestError, match=r"rank-00000\.txt"):
        read_trace(folder)


@pytest.mark.parametrize("text", ["", "F0.0 F0", "F0.0\nF0"])
def test_a_trace_cut_short_is_an_error(folder, text):
    (folder / "rank-00001.txt").write_text(text)
    with pytest.raises(RequestError, match=r"rank-00001\.txt.*whole lines"):
        read_trace(folder)


def test_a_step_that_was_not_traced_is_an_error(folder):
    with pytest.raises(RequestError, match="2 whole lines, asked for 3"):
        read_trace(folder, step=2)
