"""The measures of style that a program can take."""

from pathlib import Path

import pytest

from pith.verify.repository import style
from pith.verify.repository.checkout import Source

MEASURES = (style.name, style.length, style.functions, style.relative_imports, style.state)


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("utils.py", "", "utils.py: the name says nothing"),
        ("x.py", "from . import y", "x.py:1: relative import"),
        ("x.py", "def f():\n    global state", "x.py:2: global state"),
        ("x.py", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1", "x.py:3: changes SEEN of the module"),
        ("x.py", "SEEN: list = []\ndef f(x):\n    SEEN.append(x)", "x.py:3: changes SEEN"),
        ("x.py", "seen = defaultdict(int)\ndef f(x):\n    seen[x] += 1", "x.py:3: changes seen"),
        ("x.py", "def f():\n" + "    pass\n" * 80, "x.py:1: f has 81 lines"),
        ("x.py", "async def f():\n" + "    pass\n" * 80, "x.py:1: f has 81 lines"),
        ("x.py", "@triton.jit\ndef f():\n" + "    pass\n" * 150, "x.py:2: f has 151 lines"),
        ("x.py", "\n" * 401, "x.py: 401 lines"),
    ],
)
def test_a_broken_measure_is_found_in_its_place(
    tmp_path: Path, name: str, text: str, finding: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    (fault,) = [fault for measure in MEASURES for fault in measure(Source(path, tmp_path))]

    assert f"{fault.where}: {fault.found}".startswith(finding)


def test_tables_that_are_only_read_and_local_lists_are_no_state(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("SIZES = {'a': 1}\ndef f(x):\n    own = []\n    own.append(SIZES[x])")

    assert list(style.state(Source(path, tmp_path))) == []


@pytest.mark.parametrize("line", ["cd {}work/main", "as asked in this{}session", "x = '{}farm/a'"])
def test_a_line_about_a_machine_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"fine\n{line.format(' ' if 'this' in line else '/')}\n")

    assert [fault.where for fault in style.foreign(path, root=tmp_path)] == ["page.md:2"]


@pytest.mark.parametrize("line", ["see framework/parts", "pith/work/x.py", "a session of training"])
def test_an_ordinary_line_is_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(line)

    assert list(style.foreign(path, root=tmp_path)) == []
