"""The shared files take any number of families: in order, once, in the style of the house."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pith.errors import UnavailableError
from pith.scaffold.arms import with_arch, with_build
from pith.scaffold.family import Family, start_of
from pith.scaffold.given import Given

ROOT = Path(__file__).parents[2]
ARCH = (ROOT / "pith" / "arch" / "__init__.py").read_text()
BUILD = (ROOT / "pith" / "train" / "build.py").read_text()
NAMES = ("opal", "zeta", "mix_8x7b", "mix_8x22b", "agate", "qwen10", "qwen3_fresh", "pyrite")


def family(name: str, *, like: str | None = None) -> Family:
    fields = {"model_type": f"{name}_type"}
    given = Given(fields, json.dumps(fields).encode())
    return Family(name, given, start_of(fields, like=like))


def classes(text: str, function: str) -> list[str]:
    """The classes that the arms of a function are about, in order."""
    (body,) = [n for n in ast.parse(text).body if getattr(n, "name", "") == function]
    if function == "build_stage":
        return re.findall(r"case (\w+)\(\)", ast.unparse(body))
    return re.findall(r"arch = (\w+)\.examine", ast.unparse(body))


def test_families_stand_in_order_once_and_formatted(tmp_path: Path) -> None:
    arch, build = ARCH, BUILD
    for name in NAMES:
        arch, build = with_arch(arch, family(name)), with_build(build, family(name))
    for name in NAMES:
        assert with_arch(arch, family(name)) == arch
        assert with_build(build, family(name)) == build
    found = classes(arch, "examine")
    assert classes(build, "build_stage") == found
    order = ["Agate", "Mix8x7b", "Mix8x22b", "Opal", "Pyrite", "Qwen3", "Qwen3Fresh", "Qwen10"]
    assert [kind for kind in found if kind in (*order, "Zeta")] == [*order, "Zeta"]
    assert 'case "mix_8x7b_type":' in arch
    for name in NAMES:
        assert len(re.findall(rf"\*{name}\.MODEL_TYPES", arch)) == 1
    for module in re.findall(r"^from (pith[.\w]*)", arch + build, flags=re.MULTILINE):
        folder = tmp_path.joinpath(*module.split("."))  # sorts as the project's own if it is there
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (tmp_path / "pith" / "arch" / "__init__.py").write_text(arch)
    (tmp_path / "pith" / "train" / "build.py").write_text(build)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    ruff = str(Path(sys.executable).with_name("ruff"))
    for words in (["check"], ["format", "--check", "--diff"]):
        command = [ruff, *words, "pith"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_else_of_the_files_changes() -> None:
    for text, insert in ((ARCH, with_arch), (BUILD, with_build)):
        longer = insert(text, family("opal")).splitlines()
        gone = [line for line in text.splitlines() if line not in longer]
        assert all(
            line.startswith(("SUPPORTED", "Architecture", "from pith.arch")) for line in gone
        )


def test_a_family_like_another_comes_before_it_because_its_pattern_would_take_both() -> None:
    build = with_build(BUILD, family("zeta", like="qwen3"))
    order = classes(build, "build_stage")
    assert order.index("Zeta") + 1 == order.index("Qwen3")


@pytest.mark.parametrize("gone", ["SUPPORTED = ", "Architecture = ", "    match "])
def test_a_file_that_is_laid_out_otherwise_is_left_to_its_developer(gone: str) -> None:
    text = ARCH.replace(gone, "    if True:  # " if gone.startswith(" ") else "_")
    text = "\n".join(
        line for line in text.splitlines() if gone != "    match " or "case" not in line
    )
    with pytest.raises(UnavailableError, match="no place") as caught:
        with_arch(text, family("opal"))
    assert caught.value.where == "pith/arch/__init__.py"
