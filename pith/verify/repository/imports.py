"""Imports point one way: a room imports only rooms below it, and the torch-free rooms no torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pith.errors import Fault
from pith.verify.repository.checkout import GUIDE, Source

# Room -> layer. AGENTS.md shows the same table.
LAYERS: Mapping[str, int] = MappingProxyType(
    {
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
        "scaffold": 8,
        "launch": 8,
        "page": 8,
        "verify": 9,
        "cli": 10,
    }
)
TORCH_FREE = ("errors", "disk", "report", "schedule", "arch", "plan", "config", "scaffold")


def edges(source: Source, *, package: Path) -> Iterator[Fault]:
    """Every import of one file of `package` that the layers forbid."""
    here = source.path.relative_to(package).parts[0].removesuffix(".py")
    is_inside = here != "__init__"
    if is_inside and here not in LAYERS:
        yield Fault(source.where(1), f"{here} is a room without a layer", "a room of the table")
        return
    for line, name in _imports(source.tree):
        root, _, rest = name.partition(".")
        there = rest.partition(".")[0]
        if root == "torch" and here in TORCH_FREE:
            yield Fault(source.where(line), f"{here} imports torch", "no torch in this room")
        if root != package.name or there not in LAYERS or there == here:
            continue
        if not is_inside or LAYERS[there] >= LAYERS[here]:
            own = f"{here} ({LAYERS[here]})" if is_inside else "the package itself"
            edge = f"{own} imports {there} ({LAYERS[there]})"
            yield Fault(source.where(line), edge, "imports of lower layers only")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def torch_free_modules(package: Path) -> list[str]:
    """The names of the modules whose import must leave torch out."""
    files = [path for room in TORCH_FREE for path in _files_of(package, room)]
    files += [package / "ops" / "__init__.py", *package.glob("ops/*/cost.py")]
    return [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.is_file()
    ]


def torch_loaded(modules: Sequence[str], *, root: Path) -> Iterator[Fault]:
    """The first of `modules`, imported one after another in `root`, after which torch is loaded."""
    code = (
        f"import sys, importlib\nfor name in {list(modules)}:\n    importlib.import_module(name)\n"
    )
    code += "    if 'torch' in sys.modules:\n        sys.exit(f'{name} loads torch')\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        yield Fault(said[-1].split()[0], said[-1], "an import that leaves torch out")


def _files_of(package: Path, room: str) -> list[Path]:
    single = package / f"{room}.py"
    return [single] if single.exists() else sorted((package / room).rglob("*.py"))


def guide_table(guide: str) -> Iterator[Fault]:
    """Where the table of rooms in the text of AGENTS.md is not LAYERS and TORCH_FREE."""
    shown = {
        (room, int(layer), bool(star))
        for layer, rooms in re.findall(r"^\| (\d+) \| (.*) \|$", guide, flags=re.MULTILINE)
        for room, star in re.findall(r"([a-z_]+)(\*?)", re.sub(r"\(.*?\)", "", rooms))
    }
    true = {(room, layer, room in TORCH_FREE) for room, layer in LAYERS.items()}
    for room, layer, free in sorted(shown - true):
        yield Fault(GUIDE, _row(room, layer, free), "the rows of the table of layers")
    for room, layer, free in sorted(true - shown):
        yield Fault(GUIDE, f"no row that says {_row(room, layer, free)}", "every room in the table")


def _row(room: str, layer: int, free: bool) -> str:
    return f"{room}{'*' if free else ''} in layer {layer}"
