"""The measures of style that a program can take."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pith.errors import Fault
from pith.verify.repository.checkout import Source

NAMELESS = ("utils", "util", "helpers", "helper", "common", "misc", "base", "core")
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_FILE_LINES = 400
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
CHANGING_METHODS = (
    *("append", "extend", "insert", "remove", "add", "discard"),
    *("update", "setdefault", "pop", "popitem", "clear"),
)
# Paths of one machine, and words about how the project came to be.
FOREIGN = re.compile(r"(?<![\w.])/(work|farm|tmp|root)/|/opt/(pypi|wheels)|\bthis\s+session\b")


def name(source: Source) -> Iterator[Fault]:
    """A file whose name says nothing."""
    if source.path.stem in NAMELESS:
        yield Fault(source.where(), "the name says nothing", "a name that says what is in it")


def length(source: Source) -> Iterator[Fault]:
    """A file that is too long."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Fault(source.where(), f"{lines} lines", f"at most {MAX_FILE_LINES}")


def functions(source: Source) -> Iterator[Fault]:
    """Functions that are too long."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            kernel = any("jit" in ast.unparse(item) for item in node.decorator_list)
            most = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
            if lines > most:
                found = f"{node.name} has {lines} lines"
                yield Fault(source.where(node.lineno), found, f"at most {most}")


def relative_imports(source: Source) -> Iterator[Fault]:
    """Imports that start with a dot."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Fault(source.where(node.lineno), "relative import", "an absolute one")


def state(source: Source) -> Iterator[Fault]:
    """State of a module: names that functions rebind, and values of the module that they change."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            found = f"global {', '.join(node.names)}"
            yield Fault(source.where(node.lineno), found, "an argument")
    values = set(_module_values(source.tree))
    for line, name in _changed(source.tree):
        if name in values:
            yield Fault(source.where(line), f"changes {name} of the module", "an argument")


def _module_values(tree: ast.Module) -> Iterator[str]:
    """The names of lists, tables, sets and objects that a module holds."""
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, MUTABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets)


def _changed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Where functions change the value behind a name: its items, or by a method for that."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                yield node.lineno, ast.unparse(node.value)
            method = node.func if isinstance(node, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in CHANGING_METHODS:
                yield method.lineno, ast.unparse(method.value)


def foreign(path: Path, *, root: Path) -> Iterator[Fault]:
    """Lines that speak of a machine or of anything but the project."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := FOREIGN.search(line):
            where = f"{path.relative_to(root).as_posix()}:{number}"
            yield Fault(where, match.group(), "words about the project alone")
