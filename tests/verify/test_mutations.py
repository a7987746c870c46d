"""The mutation corpus: every entry is a change that can be tried, and the campaign tries it."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pith.cli.app import build
from pith.cli.check import refusal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "broken" / "mutations"
CAMPAIGN = ROOT / "tools" / "campaigns" / "mutations.py"
FAULTS = ("train", "layer", "engine", "data", "schedule", "repository")
READERS = {".py": compile, ".toml": tomllib.loads, ".json": json.loads}


def read(name: str) -> dict[str, dict[str, Any]]:
    """The mutations of one file by name."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def everything() -> dict[str, dict[str, Any]]:
    return {name: table for kind in (*FAULTS, "harmless") for name, table in read(kind).items()}


def commands(table: dict[str, Any]) -> list[str]:
    return [*table.get("caught", {}), *table.get("passes", ())]


def test_there_are_many_faults_and_harmless_changes_and_each_has_its_commands() -> None:
    faults = {name: table for kind in FAULTS for name, table in read(kind).items()}
    assert len(faults) >= 28
    assert all(table["caught"] and "passes" not in table for table in faults.values())
    harmless = read("harmless")
    assert len(harmless) >= 10
    assert all(table["passes"] for table in harmless.values())
    assert [name for name, table in harmless.items() if "caught" in table] == [
        "other-order-of-sums"  # as long as nobody says that it is one
    ]
    assert len(everything()) == len(faults) + len(harmless)


@pytest.mark.parametrize("name", everything())
def test_a_mutation_has_one_place_and_leaves_a_file_that_can_be_read(name: str) -> None:
    table = everything()[name]
    path = ROOT / table["file"]
    text = path.read_text()
    assert text.count(table["found"]) == 1
    changed = text.replace(table["found"], table["replaced"])
    assert changed != text
    if path.suffix == ".py":
        compile(changed, str(path), "exec")
    elif path.suffix in READERS:
        READERS[path.suffix](changed)


def test_every_command_of_the_corpus_is_one_that_pith_takes() -> None:
    program = typer.main.get_command(build())
    lines = {command for table in everything().values() for command in commands(table)}
    assert {line: refusal(program, shlex.split(line)) for line in lines} == dict.fromkeys(lines, "")


def campaign(*options: str, out: Path) -> tuple[int, list[dict[str, Any]], str]:
    command = [sys.executable, str(CAMPAIGN), "--jobs", "2", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_faults_are_caught_by_the_cheapest_commands_that_should(tmp_path: Path) -> None:
    names = ("swapped-swiglu", "recipe-out-of-bounds", "docstring")
    only = [f"--only={name}" for name in names]
    status, outcomes, told = campaign(
        *only, "--commands=swiglu", "--commands=recipe", out=tmp_path / "found.json"
    )
    assert status == 0, told
    assert {(o["mutation"], o["status"], bool(o["failed"])) for o in outcomes} == {
        ("swapped-swiglu", 1, True),
        ("recipe-out-of-bounds", 1, True),
        ("docstring", 0, False),
    }
    assert not any(outcome["fault"] for outcome in outcomes)
    assert re.search(r"^check ops catches +1 of +1$", told, flags=re.MULTILINE)


WRONG = """
[escapes]
file = "pith/recipes/tiny-moe/recipe.toml"
found = "# A small MoE of our own"
replaced = "# A MoE of our own"
caught = {"check recipe tiny-moe" = "loads"}

[is-refused]
file = "pith/recipes/tiny-moe/recipe.toml"
found = "ep = 2"
replaced = "ep = 3"
passes = ["check recipe tiny-moe"]

[is-called-another]
file = "pith/recipes/tiny-moe/recipe.toml"
found = "ep = 2"
replaced = "ep = 3"
caught = {"check recipe tiny-moe" = "rope"}
"""


def test_the_campaign_fails_where_a_fault_escapes_or_a_harmless_change_is_refused(
    tmp_path: Path,
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "wrong.toml").write_text(WRONG)
    status, outcomes, told = campaign(f"--corpus={corpus}", out=tmp_path / "found.json")
    assert status == 1, told
    assert {outcome["mutation"]: outcome["fault"] for outcome in outcomes} == {
        "escapes": "exit status 0",
        "is-refused": "exit status 1",
        "is-called-another": "nothing said of rope",
    }
