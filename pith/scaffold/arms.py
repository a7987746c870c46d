"""The two places where all families meet, with one more family in them.

Every piece (imports, list of model types, union, arm of a match) is put in where it is missing, in
order, and left alone where it is there.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pith.errors import UnavailableError
from pith.scaffold.family import Family

ARCH, BUILD = "pith/arch/__init__.py", "pith/train/build.py"
COLUMNS = 100
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines in the place of those from `first` up to before `last`, counted from 0."""

    first: int
    last: int
    lines: Sequence[str]


def with_arch(text: str, family: Family) -> str:
    """The text of pith/arch/__init__.py that knows the family too."""
    tree, name, kind = ast.parse(text), family.name, family.class_name
    arm = (f'case "{family.given.model_type}":', f"    arch = {kind}.examine(fields)")
    edits = [
        _import(tree, ARCH, "pith.arch", name),
        _import(tree, ARCH, f"pith.arch.{name}", kind),
        _list(tree, "SUPPORTED", f"*{name}.MODEL_TYPES", _tuple),
        _list(tree, "Architecture", kind, _union),
        _arm(tree, "examine", arm, family),
    ]
    return _apply(text, edits)


def with_build(text: str, family: Family) -> str:
    """The text of pith/train/build.py that knows the family too."""
    tree, name, kind = ast.parse(text), family.name, family.class_name
    arm = (
        f"case {kind}():",
        f"    stage = {kind}Stage(architecture, layers, **place, **made_of)",
    )
    edits = [
        _import(tree, BUILD, f"pith.arch.{name}", kind),
        _import(tree, BUILD, f"pith.models.{name}", f"{kind}Stage"),
        _arm(tree, "build_stage", arm, family),
    ]
    return _apply(text, edits)


def _apply(text: str, edits: Sequence[Edit | None]) -> str:
    lines = text.splitlines()
    for edit in sorted((e for e in edits if e), key=lambda e: (e.first, e.last), reverse=True):
        lines[edit.first : edit.last] = edit.lines
    return "\n".join(lines) + "\n"


def _import(tree: ast.Module, place: str, module: str, name: str) -> Edit | None:
    """`from module import name`, beside what is imported from there, or on a line of its own."""
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    ours = [(node, node.module) for node in nodes if (node.module or "").startswith("pith")]
    for node, source in ours:
        if source == module:
            names = [alias.name for alias in node.names]
            if name in names:
                return None
            line = _wrapped(f"from {module} import ", sorted([*names, name], key=_natural), ", ")
            return Edit(node.lineno - 1, node.end_lineno or node.lineno, line)
    line = (f"from {module} import {name}",)
    for node, source in ours:
        if _natural(source or "") > _natural(module):
            return Edit(node.lineno - 1, node.lineno - 1, line)
    if not ours:
        raise _no_place("import of pith", place)
    end = ours[-1][0].end_lineno or ours[-1][0].lineno
    return Edit(end, end, line)


def _list(
    tree: ast.Module, target: str, item: str, render: Callable[[str, list[str]], Sequence[str]]
) -> Edit | None:
    """The assignment to `target` with `item` among its items."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target:
            items = [*_items(node.value)]
            if item in items:
                return None
            lines = render(target, sorted([*items, item], key=_natural))
            return Edit(node.lineno - 1, node.end_lineno or node.lineno, lines)
    raise _no_place(f"{target} = ...", ARCH)


def _items(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Tuple):
        yield from map(ast.unparse, value.elts)
    elif isinstance(value, ast.BinOp):
        yield from _items(value.left)
        yield from _items(value.right)
    else:
        yield ast.unparse(value)


def _tuple(target: str, items: list[str]) -> Sequence[str]:
    return _wrapped(f"{target} = ", items, ", ", is_tuple=True)


def _union(target: str, items: list[str]) -> Sequence[str]:
    return _wrapped(f"{target} = ", items, " | ")


def _wrapped(start: str, items: list[str], joint: str, *, is_tuple: bool = False) -> Sequence[str]:
    """One line where it fits; else an item a line in brackets."""
    whole = joint.join(items)
    line = f"{start}({whole})" if is_tuple else f"{start}{whole}"
    if len(line) <= COLUMNS:
        return (line,)
    if joint == ", ":
        return (f"{start}(", *(f"    {item}," for item in items), ")")
    first, *rest = items
    return (f"{start}(", f"    {first}", *(f"    | {item}" for item in rest), ")")


def _arm(tree: ast.Module, function: str, arm: Sequence[str], family: Family) -> Edit | None:
    """The arm before that of a later family, and before that of the family it begins with, whose
    pattern would take it too."""
    found = [n for n in _inside(tree, ast.FunctionDef) if n.name == function]
    matches = [match for node in found for match in _inside(node, ast.Match)]
    if not matches:
        raise _no_place(f"match in {function}", ARCH if function == "examine" else BUILD)
    cases = matches[0].cases
    kinds = [_class_of(case) for case in cases]
    if family.class_name in kinds:
        return None
    margin = " " * (cases[0].pattern.col_offset - len("case "))
    lines = [margin + line for line in arm]
    for case, kind in zip(cases, kinds, strict=True):
        is_later = kind is None or _natural(kind) > _natural(family.class_name)
        if is_later or kind == family.start.arch:
            return Edit(case.pattern.lineno - 1, case.pattern.lineno - 1, lines)
    end = cases[-1].body[-1].end_lineno or 0
    return Edit(end, end, lines)


def _class_of(case: ast.match_case) -> str | None:
    """The class of facts that an arm is about; None for the arm of everything else."""
    if isinstance(case.pattern, ast.MatchClass):
        return ast.unparse(case.pattern.cls)
    calls = _inside(case.body[0], ast.Call)
    is_wild = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
    return None if is_wild or not calls else ast.unparse(calls[0].func).partition(".")[0]


def _inside(tree: ast.AST, kind: type[Node]) -> list[Node]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts names as the house sorts imports: numbers in them by their value."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _no_place(missing: str, where: str) -> UnavailableError:
    return UnavailableError(
        "scaffold.no_place",
        what="a new family has no place there",
        found=f"no {missing}",
        wanted="the layout that pith ships",
        where=where,
        next_step="add the family by hand, after the pattern of another one",
    )
