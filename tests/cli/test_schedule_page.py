"""docs/schedules.md: its pictures, figures and example are what the commands and builders give."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pith.cli.app import run
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build
from pith.schedule.costs import Costs
from pith.schedule.simulate import simulate
from pith.schedule.timeline import number
from pith.schedule.verify import INVARIANTS, verify

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
PAGES = PAGE + (ROOT / "README.md").read_text()


def drawing(picture: Path) -> list[str]:
    """The words of the command that a page gives for `picture`."""
    (line,) = set(re.findall(rf"^pith (schedule draw .*/{re.escape(picture.name)})$", PAGES, re.M))
    return shlex.split(line)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_what_its_command_draws(picture: Path, tmp_path: Path) -> None:
    words = drawing(picture)
    assert words[-1] == f"docs/pictures/{picture.name}"
    assert run([*words[:-1], str(tmp_path / "picture.svg")]) == 0
    assert (tmp_path / "picture.svg").read_bytes() == picture.read_bytes()


def test_every_picture_of_a_page_is_there() -> None:
    shown = {Path(name).name for name in re.findall(r"!\[.*\]\((.*\.svg)\)", PAGES)}
    assert shown == {path.name for path in PICTURES}


def test_the_figures_are_those_of_the_simulator() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (\d) \| (\S+) \| (\S+) \| (\S+) \| (.+) \|$", PAGE, re.M)
    assert {name for name, *_ in rows} == {*SCHEDULES, *SIMULATION_ONLY} - {"list"}
    for name, *told in rows:
        plan = simulate(build(name, pp=4, num_micro_batches=16))
        stages = len(plan.table.placement.stages(0))
        peaks = " ".join(map(number, plan.peak_live))
        times = [number(plan.makespan), number(plan.bubble), f"{plan.efficiency:.3f}"]
        assert told == [str(stages), *times, peaks], name


def test_every_schedule_and_invariant_is_explained() -> None:
    for name in (*SCHEDULES, *SIMULATION_ONLY):
        assert f"**{name}**" in PAGE, name
    (table,) = re.findall(r"\| invariant \|.*\n((?:\|.*\n)+)", PAGE)
    named = re.findall(r"^\| ([\w, ]+) \|", table, re.M)
    assert {word for cell in named for word in cell.split(", ")} == set(INVARIANTS)


def test_the_example_is_a_schedule_in_under_sixty_lines() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert code.count("\n") < 60
    found: dict[str, Any] = {}
    exec(compile(code, "docs/schedules.md", "exec"), found)
    eager = found["eager_1f1b"]
    for pp in range(1, 7):
        for count in range(1, 14):
            assert verify(eager(pp, num_micro_batches=count)) == ()
    slow = Costs(f=2, i=2, w=2, comm=2)
    mine = simulate(eager(4, num_micro_batches=16), slow)
    plain = simulate(build("1f1b", pp=4, num_micro_batches=16), slow)
    assert mine.makespan < plain.makespan
    assert max(mine.peak_live) > max(plain.peak_live)
