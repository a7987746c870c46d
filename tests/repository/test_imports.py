"""Imports point one way: a room imports only rooms below it, and the torch-free rooms no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LAYERS = {
    "errors": 0,
    "disk": 0,
    "report": 1,
    "schedule": 2,
    "arch": 2,
    "ops": 2,
    "plan": 3,
    "config": 4,
    "comm": 5,
    "data": 5,
    "run": 5,
    "layer": 6,
    "checkpoint": 6,
    "models": 7,
    "engine": 7,
    "train": 8,
    "profile": 8,
    "scaffold": 8,
    "launch": 8,
    "page": 8,
    "verify": 9,
    "cli": 10,
}
TORCH_FREE = ("errors", "disk", "report", "schedule", "arch", "plan", "config")


def offending_edges(package: Path) -> list[str]:
    """Every import in `package` that architecture forbids, as FILE:LINE and the edge."""
    return [
        f"{path.relative_to(package.parent)}:{line} {edge}"
        for path in sorted(package.rglob("*.py"))
        for line, edge in _edges_of(path, package)
    ]


def _edges_of(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    here = path.relative_to(package).parts[0].removesuffix(".py")
    is_inside = here != "__init__"
    if is_inside and here not in LAYERS:
        yield 1, f"{here} is a room without a layer"
        return
    for line, name in _imports(ast.parse(path.read_text())):
        root, _, rest = name.partition(".")
        there = rest.partition(".")[0]
        if root == "torch" and here in TORCH_FREE:
            yield line, f"{here} imports torch"
        if root != package.name or there not in LAYERS or there == here:
            continue
        if not is_inside or LAYERS[there] >= LAYERS[here]:
            own = f"{here} ({LAYERS[here]})" if is_inside else "the package itself"
            yield line, f"{own} imports {there} ({LAYERS[there]})"


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def test_every_room_imports_only_rooms_below_it(repository: Any) -> None:
    assert offending_edges(repository.package) == []


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
    path = tmp_path / "pith" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)

    (found,) = offending_edges(tmp_path / "pith")

    assert found.startswith(f"pith/{file}:")
    assert edge in found


def test_imports_downwards_and_inside_a_room_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "pith" / "train" / "loop.py"
    path.parent.mkdir(parents=True)
    path.write_text("import pith\nfrom pith.train.step import x\nfrom pith.engine import y")

    assert offending_edges(tmp_path / "pith") == []


def test_importing_a_torch_free_room_leaves_torch_out(repository: Any) -> None:
    package = repository.package
    files = [path for room in TORCH_FREE for path in _files_of(package, room)]
    files += [package / "ops" / "__init__.py", *package.glob("ops/*/cost.py")]
    names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in files
    ]
    assert "pith.arch" in names

    code = f"import sys, importlib\nfor n in {names}:\n    importlib.import_module(n)\n"
    code += "    assert 'torch' not in sys.modules, n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def _files_of(package: Path, room: str) -> list[Path]:
    single = package / f"{room}.py"
    return [single] if single.exists() else sorted((package / room).rglob("*.py"))
