"""Imports point one way: a room imports only rooms below it, and the torch-free rooms no torch."""

from pathlib import Path

import pytest

from pith.verify.repository import imports
from pith.verify.repository.checkout import Checkout, Source


def edges_of(root: Path, file: str, text: str) -> list[str]:
    """The forbidden edges of one file of a package below `root`."""
    path = root / "pith" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    source = Source(path, root)
    return [
        f"{fault.where} {fault.found}" for fault in imports.edges(source, package=root / "pith")
    ]


@pytest.mark.parametrize(
    ("file", "text", "edge"),
    [
        ("plan/mesh.py", "from pith.config import Recipe", "plan (3) imports config (4)"),
        ("train/loop.py", "from pith.launch.job import Job", "train (8) imports launch (8)"),
        ("comm/ring.py", "import pith.data.order", "comm (5) imports data (5)"),
        ("engine/run.py", "from pith import cli", "engine (7) imports cli (10)"),
        ("report.py", "def f():\n    from pith.arch import x", "report (1) imports arch (2)"),
        ("arch/qwen3.py", "import torch.nn", "arch imports torch"),
        ("config.py", "from torch import Tensor", "config imports torch"),
        ("__init__.py", "from pith.errors import PithError", "imports errors (0)"),
        ("helpers/x.py", "", "helpers is a room without a layer"),
    ],
)
def test_a_forbidden_import_is_found_and_named(
    tmp_path: Path, file: str, text: str, edge: str
) -> None:
    (found,) = edges_of(tmp_path, file, text)

    assert found.startswith(f"pith/{file}:")
    assert edge in found


def test_imports_downwards_and_inside_a_room_are_accepted(tmp_path: Path) -> None:
    text = "import pith\nfrom pith.train.step import x\nfrom pith.engine import y"

    assert edges_of(tmp_path, "train/loop.py", text) == []


def test_the_torch_free_modules_are_those_of_the_rooms_and_the_room_of_operators(
    repository: Checkout,
) -> None:
    modules = imports.torch_free_modules(repository.package)

    assert {"pith.arch", "pith.errors", "pith.schedule.table", "pith.ops"} <= set(modules)
    assert not {"pith.train.loop", "pith.ops.rope.reference"} & set(modules)


@pytest.mark.parametrize(
    ("text", "found"),
    [("import torch", "late loads torch"), ("import nowhere", "No module named 'nowhere'")],
)
def test_a_module_that_loads_torch_by_a_detour_or_does_not_load_is_found(
    tmp_path: Path, text: str, found: str
) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "early.py").write_text("import json")
    (tmp_path / "late.py").write_text("import detour")
    (tmp_path / "detour.py").write_text(text)

    (fault,) = imports.torch_loaded(["early", "late"], root=tmp_path)

    assert found in fault.found


@pytest.mark.parametrize(
    ("true", "wrong", "found"),
    [
        ("| 3 | plan* |\n", "", ["no row that says plan* in layer 3"]),
        ("| 3 | plan*", "| 4 | plan*", ["plan* in layer 4", "no row that says plan* in layer 3"]),
        ("| 3 | plan*", "| 3 | plan", ["plan in layer 3", "no row that says plan* in layer 3"]),
        ("| 3 | plan*", "| 3 | plan*, attic", ["attic in layer 3"]),
    ],
)
def test_a_guide_with_another_table_of_rooms_is_found(
    repository: Checkout, true: str, wrong: str, found: list[str]
) -> None:
    guide = repository.read("AGENTS.md")
    assert guide.count(true) == 1

    assert list(imports.guide_table(guide)) == []
    assert [f.found for f in imports.guide_table(guide.replace(true, wrong))] == found
