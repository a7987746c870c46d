"""Pages say what is true: commands parse, targets and paths exist, skills have their form."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pith.cli.app import build, run

HEADINGS = ["When", "Needs", "Do", "Success", "If it fails", "Never"]
TOP_LEVEL = ("pith", "tests", "docs", "skills", "tools", "examples")


def shell_lines(page: str) -> list[str]:
    """The lines of the shell blocks of a page, comments taken off."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).split("\n")
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def parse(command: str) -> None:
    """Parse a `pith` command line without running it; raises what Typer raises for a wrong one."""
    program, *words = shlex.split(command)
    assert program == "pith"
    node: Any = typer.main.get_command(build())
    while words and hasattr(node, "commands"):
        assert words[0] in node.commands, f"no command {words[0]}"
        node = node.commands[words.pop(0)]
    node.make_context("pith", words)


def missing_paths(page: str, *, root: Path) -> list[str]:
    """Paths of the project that a page names and that are not there."""
    named = re.findall(rf"(?<![\w./-])(?:{'|'.join(TOP_LEVEL)})/[\w./-]*\w", page)
    return sorted({path for path in named if not (root / path).exists()})


def frontmatter(page: str) -> dict[str, str]:
    """The plain keys between the two rules at the top of a skill page."""
    _, head, _ = page.split("---\n", 2)
    return dict(re.findall(r"^(\w+): ?(.*)$", head, flags=re.MULTILINE))


def skill_faults(path: Path) -> list[str]:
    """What in a skill page breaks its form."""
    page = path.read_text()
    head = frontmatter(page)
    faults = []
    if head.get("name") != path.stem or not re.fullmatch(r"[a-z0-9-]{1,64}", path.stem):
        faults.append("name")
    if not 0 < len(head.get("description", "")) <= 500:
        faults.append("description")
    if set(head) - {"name", "description", "metadata"}:
        faults.append("keys")
    if re.findall(r"^## (.*)$", page, flags=re.MULTILINE) != HEADINGS:
        faults.append("headings")
    if page.count("\n") > 150:
        faults.append("length")
    return faults


def pith_commands(repository: Any) -> list[str]:
    lines = [line for page in repository.pages() for line in shell_lines(page.read_text())]
    return [line for line in lines if line.startswith("pith ")]


def test_every_pith_command_of_a_page_parses(repository: Any) -> None:
    commands = pith_commands(repository)

    assert len(commands) > 10
    for command in commands:
        parse(command)


def test_every_run_that_a_page_proposes_has_a_plan(repository: Any) -> None:
    runs = [command for command in pith_commands(repository) if command.startswith("pith train")]
    words = {command: shlex.split(command.partition("--out")[0])[1:] for command in runs}

    assert {command: run([*words[command], "--dry-run"]) for command in runs} == dict.fromkeys(
        runs, 0
    )


@pytest.mark.parametrize(
    "command",
    ["pith fly", "pith train --wings", "pith train a b", "pith tokenize", "pith recipe x"],
)
def test_a_command_that_does_not_exist_is_refused(command: str) -> None:
    with pytest.raises(Exception, match=r"[Nn]o (such|command)|unexpected|[Mm]issing"):
        parse(command)


def test_every_make_target_of_a_page_is_in_the_makefile(repository: Any) -> None:
    makefile = (repository.root / "Makefile").read_text()
    pages = "\n".join(page.read_text() for page in repository.pages())
    named = set(re.findall(r"(?:^|`)(?:\w+=\S+ )?make ([\w-]+)", pages, flags=re.MULTILINE))

    assert {"train", "test"} <= named
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    assert named <= targets


def test_continuous_integration_runs_the_tests(repository: Any) -> None:
    script = repository.root / ".ci" / "run"

    assert "make test" in script.read_text()
    assert script.stat().st_mode & 0o100


def test_every_path_that_a_page_names_exists(repository: Any) -> None:
    missing = {
        page.name: missing_paths(page.read_text(), root=repository.root)
        for page in repository.pages()
    }
    assert not {name: paths for name, paths in missing.items() if paths}


def test_a_path_that_is_not_there_is_found(repository: Any) -> None:
    page = "see pith/errors.py, pith/nothing.py and `docs/none/`"

    assert missing_paths(page, root=repository.root) == ["docs/none", "pith/nothing.py"]


def test_every_skill_has_its_form_and_stands_in_the_guide(repository: Any) -> None:
    skills = sorted((repository.root / "skills").glob("*.md"))
    guide = (repository.root / "AGENTS.md").read_text()

    assert skills
    assert {path.name: skill_faults(path) for path in skills} == {p.name: [] for p in skills}
    assert [path.name for path in skills if f"skills/{path.name}" not in guide] == []


@pytest.mark.parametrize(
    ("found", "replaced", "fault"),
    [
        ("name: train-tiny", "name: other", "name"),
        ("description: ", "description: " + "long " * 100, "description"),
        ("name: ", "model: big\nname: ", "keys"),
        ("## Never", "## Sometimes", "headings"),
        ("## Never", "\n" * 150 + "## Never", "length"),
    ],
)
def test_a_skill_page_out_of_form_is_found(
    repository: Any, tmp_path: Path, found: str, replaced: str, fault: str
) -> None:
    page = (repository.root / "skills" / "train-tiny.md").read_text()
    broken = tmp_path / "train-tiny.md"
    broken.write_text(page.replace(found, replaced, 1))

    assert skill_faults(broken) == [fault]


def test_the_guide_for_agents_is_short_and_imported(repository: Any) -> None:
    guide = (repository.root / "AGENTS.md").read_text()
    pointer = repository.root / ".claude" / "CLAUDE.md"
    target = pointer.read_text().strip().removeprefix("@")

    assert guide.count("\n") <= 120
    assert (pointer.parent / target).resolve() == repository.root / "AGENTS.md"


def test_the_changelog_has_an_entry_for_what_is_not_released(repository: Any) -> None:
    assert "## [Unreleased]" in (repository.root / "CHANGELOG.md").read_text()


def test_the_licence_is_the_one_that_the_package_declares(repository: Any) -> None:
    project = tomllib.loads((repository.root / "pyproject.toml").read_text())["project"]
    licence = (repository.root / "LICENSE").read_text()

    assert project["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
