"""Pages say what is true: commands parse, targets and paths exist, skills have their form."""

import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from pith.cli.app import build, run
from pith.cli.check import refusal
from pith.verify.repository import pages
from pith.verify.repository.checkout import Checkout


def test_every_run_that_a_page_proposes_has_a_plan(repository: Checkout) -> None:
    lines = [line for _, line in pages.commands(repository)]
    runs = [line for line in lines if line.startswith("pith train")]
    words = {command: shlex.split(command.partition("--out")[0])[1:] for command in runs}

    assert len(lines) > 10
    assert {command: run([*words[command], "--dry-run"]) for command in runs} == dict.fromkeys(
        runs, 0
    )


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("pith fly", "no command fly"),
        ("pith train --wings", "No such option"),
        ("pith train a b", "unexpected"),
        ("pith tokenize", "Missing"),
        ("pith recipe x", "no command x"),
        ("pith recipe", "command"),
        ("pith train 'a", "No closing quotation"),
    ],
)
def test_a_command_that_does_not_exist_is_refused(command: str, reason: str) -> None:
    program = typer.main.get_command(build())

    (fault,) = pages.refused_commands(
        [("page.md", command)], refusal=lambda words: refusal(program, words)
    )

    assert fault.where == "page.md"
    assert reason in fault.found


@pytest.mark.parametrize("words", [["train", "--dry-run"], ["--version"], ["recipe", "--help"]])
def test_a_command_that_exists_is_taken(words: list[str]) -> None:
    assert refusal(typer.main.get_command(build()), words) == ""


def test_only_shell_blocks_hold_commands_and_comments_are_none() -> None:
    page = "```sh\npith a  # why\n# pith b\n```\n```\npith c\n```\n  ```sh\n  pith d\n  ```\n"

    assert pages.shell_lines(page) == ["pith a", "pith d"]


def test_a_make_target_that_is_not_there_is_found(repository: Checkout) -> None:
    named = pages.make_targets(repository)
    assert {"train", "test"} <= {target for _, target in named}

    missing = pages.missing_targets([*named, ("page.md", "tea")], makefile="train:\ntest: x\n")

    assert {(fault.where, fault.found) for fault in missing} == {("page.md", "make tea")}


def test_a_path_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("see pith/errors.py, pith/nothing.py and `docs/none/`")
    (tmp_path / "pith").mkdir()
    (tmp_path / "pith" / "errors.py").touch()

    missing = pages.missing_paths(page, root=tmp_path)

    assert [(f.where, f.found) for f in missing] == [
        ("page.md", "docs/none"),
        ("page.md", "pith/nothing.py"),
    ]


@pytest.mark.parametrize(
    ("found", "replaced", "fault"),
    [
        ("name: train-tiny", "name: other", "name 'other'"),
        ("description: ", "description: " + "long " * 100, "a description of"),
        ("name: ", "model: big\nname: ", "keys model"),
        ("## Never", "## Sometimes", "headings"),
        ("## Never", "\n" * 150 + "## Never", "length"),
    ],
)
def test_a_skill_page_out_of_form_is_found(
    repository: Checkout, tmp_path: Path, found: str, replaced: str, fault: str
) -> None:
    page = repository.read("skills/train-tiny.md")
    broken = tmp_path / "train-tiny.md"
    broken.write_text(page.replace(found, replaced, 1))

    (only,) = pages.skill(broken, guide=repository.read("AGENTS.md"))

    assert only.found.startswith(fault)


def test_a_skill_page_without_its_top_or_its_row_in_the_guide_is_found(
    repository: Checkout, tmp_path: Path
) -> None:
    whole = repository.root / "skills" / "train-tiny.md"
    bare = tmp_path / "train-tiny.md"
    bare.write_text(whole.read_text().split("---\n", 2)[2])

    assert [fault.found for fault in pages.skill(whole, guide="")] == ["not listed in AGENTS.md"]
    assert [fault.found for fault in pages.skill(bare, guide="skills/train-tiny.md")] == [
        "name ''",
        "a description of 0 characters",
    ]


@pytest.mark.parametrize(
    ("guide", "pointer", "where"),
    [
        ("x\n" * 121, "@../AGENTS.md", "AGENTS.md"),
        ("", "@../AGENTS.md", "AGENTS.md"),
        ("x\n", "@../README.md", ".claude/CLAUDE.md"),
        ("x\n", "", ".claude/CLAUDE.md"),
    ],
)
def test_a_guide_too_long_or_led_to_by_nothing_is_found(
    tmp_path: Path, guide: str, pointer: str, where: str
) -> None:
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "CLAUDE.md").write_text(pointer)
    (tmp_path / "AGENTS.md").write_text(guide)

    assert [fault.where for fault in pages.guide(Checkout(tmp_path))] == [where]


def test_continuous_integration_runs_the_tests(repository: Checkout) -> None:
    script = repository.root / ".ci" / "run"

    assert "make test" in script.read_text()
    assert script.stat().st_mode & 0o100


def test_the_changelog_has_an_entry_for_what_is_not_released(repository: Checkout) -> None:
    assert "## [Unreleased]" in repository.read("CHANGELOG.md")


def test_the_licence_is_the_one_that_the_package_declares(repository: Checkout) -> None:
    project = tomllib.loads(repository.read("pyproject.toml"))["project"]
    licence = repository.read("LICENSE")

    assert project["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
