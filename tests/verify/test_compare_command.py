"""`pith compare` as a command: exit status, words on stderr, one JSON object, one page."""

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pith.cli.app import run

Answer = tuple[int, dict[str, Any], str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run `pith compare ... --json`: exit status, the report, and the words."""

    def asked(*words: object) -> Answer:
        status = run(["compare", *map(str, words), "--json"])
        stdout, stderr = capsys.readouterr()
        report = json.loads(stdout, parse_constant=pytest.fail)
        assert stdout == json.dumps(report, sort_keys=True) + "\n"
        assert (report["exit"], report["ok"]) == (status, status == 0)
        return status, report, stderr

    return asked


def spoil(path: Path, *, loss: object) -> None:
    """Another loss in step 4."""
    lines = path.joinpath("metrics.jsonl").read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith('{"step": 4'))
    lines[place] = json.dumps({**json.loads(lines[place]), "loss": loss})
    path.joinpath("metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_equal_runs_exit_0_with_every_promised_key(
    plain: Path, twin: Path, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    status, report, text = ask(plain, twin, "--out", tmp_path / "out.json")

    assert status == 0
    data = report["data"]
    assert data["first_difference"] is None
    assert data["max_relative"]["loss"] == data["max_relative"]["grad_norm"] == 0
    assert (data["steps_compared"], data["speed_ratio"], data["memory_ratio"]) == (6, 1, 1)
    assert all(check["ok"] for check in report["checks"])
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert "tolerance  same order on a CPU: equal bits" in text
    assert "beyond it  nothing" in text
    assert "left out" not in text


def test_a_difference_exits_1_and_is_told_with_its_step(
    plain: Path, twin: Path, ask: Callable[..., Answer]
) -> None:
    spoil(twin, loss=5.0)
    status, report, text = ask(plain, twin)

    assert status == 1
    assert report["data"]["first_difference"]["step"] == 4
    assert report["data"]["first_difference"]["quantity"] == "loss"
    assert report["data"]["first_difference"]["b"] == 5.0
    assert "beyond it  loss of step 4: " in text
    assert "FAILED loss (step 4): found step 4: " in text


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_is_no_number_exits_1_with_sound_json(
    plain: Path, twin: Path, ask: Callable[..., Answer], loss: float | None
) -> None:
    spoil(twin, loss=loss)
    status, report, text = ask(plain, twin, "--no-weights", "--reordered")

    assert status == 1
    assert report["data"]["max_relative"]["loss"] is None
    assert report["data"]["first_difference"]["relative"] is None
    assert "step 4: loss is" in text


def test_weights_that_are_left_out_are_said_to_be(
    plain: Path, twin: Path, ask: Callable[..., Answer]
) -> None:
    (twin / "checkpoints" / "step-00000006" / "__0_0.distcp").open("r+b").write(b"dead")

    assert ask(plain, twin)[0] == 1
    status, report, text = ask(plain, twin, "--no-weights")
    assert status == 0
    assert report["data"]["weights"] is None
    assert "weights    left out: final tensors were not compared" in text


@pytest.mark.parametrize(
    ("bound", "status"),
    [
        (("--min-speed", "1"), 0),
        (("--min-speed", "1.01"), 1),
        (("--max-memory", "1"), 0),
        (("--max-memory", "0.99"), 1),
        (("--min-speed", "nan"), 2),
        (("--min-speed", "-1"), 2),
    ],
)
def test_ratios_are_checks_where_bounds_are_given(
    plain: Path, twin: Path, ask: Callable[..., Answer], bound: tuple[str, str], status: int
) -> None:
    found, report, _ = ask(plain, twin, "--no-weights", *bound)

    assert found == status
    names = [check["name"] for check in report["checks"]]
    assert status == 2 or names[-1] == bound[0].partition("-m")[2].partition("-")[2]


@pytest.mark.parametrize("broken", ["nothing", "a file", "an empty folder", "no recipe", "no text"])
@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_no_run_folder_is_refused(
    plain: Path, tmp_path: Path, ask: Callable[..., Answer], broken: str, is_first: bool
) -> None:
    other = tmp_path / "other"
    match broken:
        case "a file":
            other.write_text("x")
        case "an empty folder":
            other.mkdir()
        case "no recipe":
            other.mkdir()
            other.joinpath("config.toml").write_text("[training]\nsteps = 'many'\n")
        case "no text":
            other.mkdir()
            other.joinpath("config.toml").write_bytes(b"\xff\x00")
    status, report, text = ask(*((other, plain) if is_first else (plain, other)))

    assert status == 2
    assert str(other) in report["error"]["where"]
    assert report["error"]["code"] == "verify.no-run"
    assert text.startswith(f"error: {other}")
    assert report["checks"] == []


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    status, report, _ = ask(tmp_path, tmp_path, "--html", tmp_path / "none" / "page.html")

    assert status == 2
    assert report["error"]["code"] == "output.unwritable"


class Elements(HTMLParser):
    """Counts tags and sees that every one is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)
        assert not {"src", "href"} & dict(attrs).keys()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_the_curves(
    plain: Path, tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    odd = shutil.copytree(plain, tmp_path / "<b>odd & name")
    spoil(odd, loss=5.0)
    status, report, _ = ask(plain, odd, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    elements = Elements()
    elements.feed(page)

    assert status == 1
    assert report["data"]["html"] == str(tmp_path / "page.html")
    assert elements.open == []
    assert elements.seen.count("svg") == 3
    assert not {"script", "link", "b"} & set(elements.seen)
    assert "//" not in page.replace(str(tmp_path), "")
    for part in ("Loss", "Gradient norm", "Relative difference", "Checks", "Recipe", "Environment"):
        assert f"<h2>{part}</h2>" in page
    failed = sum(not check["ok"] for check in report["checks"])
    assert f"{failed} of {len(report['checks'])} checks failed" in page


def test_both_curves_are_drawn_within_80_columns(
    real_runs: tuple[Path, Path], ask: Callable[..., Answer]
) -> None:
    _, _, text = ask(*real_runs)
    drawn = [line for line in text.splitlines() if line[11:13] in (" |", " +")]

    assert len(drawn) == 2 * 13
    assert all(len(line) <= 80 for line in drawn)
    assert "+ A plain  x B larger  * both" in text
