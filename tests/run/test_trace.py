"""The trace gives back what each rank ran and when, and says so when it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from pith.errors import RequestError, RunFailedError
from pith.run.trace import TracedStep, TraceFile, read_trace
from pith.schedule.simulate import Span
from pith.schedule.table import parse_slot

ROWS = ("F0.0 F0.1 I0.0 B0.1 W0.0", "F1.0 F1.1|B1.0 B1.1")


def spans(row: str, *, start: float = 0.5) -> tuple[Span, ...]:
    """Slots of a quarter second, each an eighth after the one before."""
    starts = [start + 0.375 * turn for turn in range(len(row.split()))]
    return tuple(
        Span(parse_slot(text), begin, begin + 0.25)
        for text, begin in zip(row.split(), starts, strict=True)
    )


def file_of(folder: Path, rank: int, num_ranks: int = 2) -> TraceFile:
    return TraceFile(folder, rank=rank, num_ranks=num_ranks)


def process(folder: Path, steps: tuple[int, ...], *, num_ranks: int = 2, start: float = 0.5) -> Any:
    """What a process of so many ranks leaves after tracing `steps`."""
    files = [file_of(folder, rank, num_ranks) for rank in range(num_ranks)]
    for file in files:
        file.clear()
    for step in steps:
        for file in files:
            file.append(step, clock="host", spans=spans(ROWS[file.rank % 2], start=start))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return process(tmp_path / "trace", (1, 3))


def test_what_ranks_wrote_comes_back_by_step_and_rank(folder: Path) -> None:
    rows = tuple(spans(row) for row in ROWS)
    assert read_trace(folder) == (TracedStep(1, "host", rows), TracedStep(3, "host", rows))
    assert read_trace(folder, step=3) == read_trace(folder)[1:]
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]


def test_a_line_is_json_that_anyone_can_read(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "rank-00001.jsonl").read_text().splitlines()]
    slots = [["F1.0", 0.5, 0.75], ["F1.1|B1.0", 0.875, 1.125], ["B1.1", 1.25, 1.5]]
    assert lines == [{"step": step, "ranks": 2, "clock": "host", "slots": slots} for step in (1, 3)]


def test_times_are_kept_to_the_nanosecond(tmp_path: Path) -> None:
    row = (Span(parse_slot("F0.0"), 1234.0000000011, 1234.0000000099),)
    file_of(tmp_path, 0, 1).append(1, clock="device", spans=row)
    assert read_trace(tmp_path)[0].rows == (
        (Span(parse_slot("F0.0"), 1234.000000001, 1234.00000001),),
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_later_process_replaces_all_of_an_earlier_one(folder: Path, num_ranks: int) -> None:
    process(folder, (3, 5), num_ranks=num_ranks, start=9.0)
    read = read_trace(folder)
    assert [traced.step for traced in read] == [3, 5]
    assert [[row[0].start for row in traced.rows] for traced in read] == [[9.0] * num_ranks] * 2


def test_a_process_that_has_traced_nothing_yet_leaves_nothing_of_an_earlier_one(
    folder: Path,
) -> None:
    for rank in range(2):
        file_of(folder, rank).clear()
    file_of(folder, 0).append(3, clock="host", spans=spans(ROWS[0]))
    with pytest.raises(RequestError, match=r"rank-00001\.jsonl.*found 0 whole lines"):
        read_trace(folder)


def test_a_rank_that_is_behind_spoils_only_the_step_that_it_lacks(folder: Path) -> None:
    whole = read_trace(folder)
    file_of(folder, 1).append(5, clock="host", spans=spans(ROWS[1]))
    for step in (None, 5):
        with pytest.raises(RequestError, match=r"rank-00000\.jsonl.*steps 1, 3; wanted step 5 of"):
            read_trace(folder, step=step)
    assert read_trace(folder, step=1) + read_trace(folder, step=3) == whole
    with pytest.raises(RequestError, match="wanted step 2 of every rank"):
        read_trace(folder, step=2)


def test_files_that_do_not_belong_together_are_an_error(folder: Path) -> None:
    for rank, num_ranks, clock, words in (
        (1, 3, "host", r"rank-00001\.jsonl.*found 3 ranks by the host; wanted 2 ranks"),
        (1, 2, "device", r"found 2 ranks by the device; wanted 2 ranks by the host"),
        (0, 3, "host", r"rank-00002\.jsonl.*the file of each rank"),
    ):
        file = process(folder, (1,)) and file_of(folder, rank, num_ranks)
        file.clear()
        file.append(1, clock=clock, spans=spans(ROWS[rank]))
        with pytest.raises(RequestError, match=words):
            read_trace(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_an_error(folder: Path, rank: int) -> None:
    (folder / f"rank-0000{rank}.jsonl").unlink()
    with pytest.raises(RequestError, match=rf"rank-0000{rank}\.jsonl: the trace cannot be read"):
        read_trace(folder)


def line(**changes: Any) -> str:
    """A sound line of a rank alone, and its end, with `changes`."""
    sound = {"step": 1, "ranks": 1, "clock": "host", "slots": [["F0.0", 0.5, 0.75]]}
    return json.dumps(sound | changes) + "\n"


BROKEN = {
    "empty": ("", "0 whole lines"),
    "cut in a line": (line()[:-9], "0 whole lines and"),
    "cut before its end": (line()[:-1], "0 whole lines and"),
    "cut in the second": (line() + line(step=2)[:30], "1 whole lines and 30 characters"),
    "a blank line": (line() + "\n", ":2.*Invalid JSON"),
    "no JSON": ("F0.0 F0.1 B0.0\n", ":1.*Invalid JSON"),
    "no object": ("[1, 2]\n", ":1.*"),
    "bytes": ("\udcff\n", "utf-8"),
    "a key is missing": (line().replace('"step": 1, ', ""), "found step Field required"),
    "a key too many": (line(rank=0), "found rank Extra"),
    "a step of no run": (line(step=0), "found step "),
    "a step that is true": (line(step=True), "found step "),
    "no ranks": (line(ranks=0), "found ranks "),
    "a clock of its own": (line(clock="sun"), "found clock "),
    "slots are text": (line(slots="F0.0"), "found slots "),
    "no time": (line(slots=[["F0.0", 0.5]]), r"found slots\.0\.2 Field required"),
    "a time in words": (line(slots=[["F0.0", 0.5, "0.75"]]), r"found slots\.0\.2 "),
    "never ended": (line(slots=[["F0.0", 0.5, None]]), r"found slots\.0\.2 "),
    "not a number": (line(slots=[["F0.0", float("nan"), 0.75]]), r"found slots\.0\.1 .*finite"),
    "endless": (line(slots=[["F0.0", 0.5, float("inf")]]), r"found slots\.0\.2 .*finite"),
    "before zero": (line(slots=[["F0.0", -0.5, 0.75]]), r"found slots\.0\.1 "),
    "backwards": (line(slots=[["F0.0", 0.75, 0.5]]), "ends at 0.5, before its start at 0.75"),
    "no slot": (line(slots=[["F0.0", 0, 1], ["F0", 1, 2]]), "'F0' is no operation"),
    "a step twice": (line() + line(), ":2.*step 1 after 1"),
    "steps out of order": (line(step=3) + line(step=2), ":2.*step 2 after 3"),
    "fewer ranks than before": (line() + line(step=2, ranks=2), "found 2 ranks"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_that_says_where_what_and_what_next(
    tmp_path: Path, case: str
) -> None:
    text, words = BROKEN[case]
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(line())
    assert len(read_trace(tmp_path)) == 1, "what the case changes should be sound"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(RequestError, match=words) as caught:
        read_trace(tmp_path)
    told = str(caught.value)
    assert told.startswith(f"{path}")
    assert "\n" not in told
    assert all(part in told for part in ("; found ", "; wanted ", "; next: "))


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("mine")
    for write in (TraceFile.clear, lambda file: file.append(1, clock="host", spans=())):
        with pytest.raises(RunFailedError, match=r"rank-00000\.jsonl: the trace cannot be written"):
            write(file_of(tmp_path / "trace", 0))
