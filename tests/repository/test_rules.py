"""`pith check repository`: the rules hold here, fail where one is broken, need a checkout."""

import json
from pathlib import Path

import pytest

from pith.cli.app import run
from pith.verify.repository.checkout import Checkout

RULES = {
    *("imports between rooms", "rooms without torch", "rooms of the guide"),
    *("file names", "file lengths", "function lengths", "absolute imports", "no state in modules"),
    *("words about the project alone", "commands of pages", "make targets of pages"),
    *("paths of pages", "skill pages", "guide for agents", "top pages"),
}


def test_the_rules_of_the_house_hold(repository: Checkout, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository.root / "tests")

    status = run(["check", "repository", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert {check["name"] for check in report["checks"]} == RULES
    assert status == 0


def test_a_checkout_that_breaks_rules_is_exit_1_with_each_place_and_each_rule_without_matter(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    for name, text in {
        "pyproject.toml": "",
        "AGENTS.md": "```sh\npith fly\n```\nsee docs/none",
        "pith/plan/utils.py": "from pith.train import x\n\ndef f():\n    global y\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    assert run(["check", "repository", "--json", "--out", "report.json"]) == 1

    stdout, words = capsys.readouterr()
    assert (tmp_path / "report.json").read_text() == stdout
    failed = [c for c in json.loads(stdout)["checks"] if not c["ok"]]
    places = {(check["name"], check["where"]) for check in failed}
    assert {
        ("imports between rooms", "pith/plan/utils.py:1"),
        ("file names", "pith/plan/utils.py"),
        ("no state in modules", "pith/plan/utils.py:4"),
        ("commands of pages", "AGENTS.md"),
        ("paths of pages", "AGENTS.md"),
        ("top pages", "README.md"),
        ("skill pages", ""),  # there are none to look at
    } <= places
    assert words.index("FAILED") < words.index("held  ")


def test_outside_of_a_checkout_it_cannot_be_checked(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["check", "repository"]) == 3

    assert "run it inside a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["AGENTS.md", "pyproject.toml"])
def test_an_installed_package_is_no_checkout(tmp_path: Path, monkeypatch, missing: str) -> None:
    (tmp_path / "pith").mkdir()
    for name in {"AGENTS.md", "pyproject.toml"} - {missing}:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    assert run(["check", "repository"]) == 3
