"""The measures of style that a program can take."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core"}
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_FILE_LINES = 400
# Paths of one machine, and words about how the project came to be.
FOREIGN = re.compile(r"(?<![\w.])/(work|farm|tmp|root)/|/opt/(pypi|wheels)|\bthis\s+session\b")


def findings(path: Path) -> list[str]:
    """What in a source file breaks a measure."""
    text = path.read_text()
    found = [f"{path.name}: the name says nothing"] if path.stem in NAMELESS else []
    if text.count("\n") > MAX_FILE_LINES:
        found.append(f"{path.name}: {text.count(chr(10))} lines")
    for node in ast.walk(ast.parse(text)):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"{where} relative import")
        if isinstance(node, ast.Global):
            found.append(f"{where} global {node.names[0]}")
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            kernel = any("jit" in ast.unparse(item) for item in node.decorator_list)
            if lines > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
                found.append(f"{where} {node.name} has {lines} lines")
    return found


def foreign(path: Path) -> list[str]:
    """Lines that speak of a machine or of anything but the project."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return [f"{path.name}:{number}" for number, line in lines if FOREIGN.search(line)]


def test_sources_of_the_package_keep_the_measures(repository: Any) -> None:
    assert [f for path in repository.package.rglob("*.py") for f in findings(path)] == []


def test_files_speak_of_the_project_alone(repository: Any) -> None:
    files = [*repository.sources(), *repository.pages(), repository.root / "Makefile"]
    files += [repository.root / "pyproject.toml", repository.root / ".ci" / "run"]

    assert [f for path in files for f in foreign(path)] == []


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("utils.py", "", "the name says nothing"),
        ("x.py", "from . import y", "relative import"),
        ("x.py", "def f():\n    global state", "global state"),
        ("x.py", "def f():\n" + "    pass\n" * 80, "f has 81 lines"),
        ("x.py", "@triton.jit\ndef f():\n" + "    pass\n" * 150, "f has 151 lines"),
        ("x.py", "\n" * 401, "401 lines"),
    ],
)
def test_a_broken_measure_is_found(tmp_path: Path, name: str, text: str, finding: str) -> None:
    path = tmp_path / name
    path.write_text(text)

    assert [finding in found for found in findings(path)] == [True]


@pytest.mark.parametrize("line", ["cd {}work/main", "as asked in this{}session", "x = '{}farm/a'"])
def test_a_line_about_a_machine_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"fine\n{line.format(' ' if 'this' in line else '/')}\n")

    assert foreign(path) == ["page.md:2"]


@pytest.mark.parametrize("line", ["see framework/parts", "pith/work/x.py", "a session of training"])
def test_an_ordinary_line_is_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(line)

    assert foreign(path) == []
