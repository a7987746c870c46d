"""What a family may be called: its files, its class, and what is taken."""

import ast
import builtins
import keyword
import re
from collections.abc import Mapping

from pith.config import shipped
from pith.errors import RequestError

MOST_LETTERS = 32
FORM = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# What the modules of a family import.
IN_ITS_FILES = (
    *("Any", "Decoder", "DecoderLayer", "DecoderStage", "FieldReader"),
    *("LayerTensors", "ParameterSpec", "Self"),
)


def class_of(name: str) -> str:
    """The class of a family: mixtral_8x7b becomes Mixtral8x7b."""
    return "".join(part.capitalize() for part in name.split("_"))


def check_form(name: str) -> None:
    """Raise RequestError where `name` cannot be the name of a Python file, and say what could."""
    taken = {spelled(recipe): recipe for recipe in shipped()}
    if name in shipped() and name != spelled(name):
        raise _refused(name, f"the shipped recipe {name}", f"model_{spelled(name)}"[:MOST_LETTERS])
    if taken.get(name, name) != name:
        found = f"as good as the shipped recipe {taken[name]}"
        raise _refused(name, found, f"model_{name}"[:MOST_LETTERS])
    words = {*keyword.kwlist, *dir(builtins), "self", "plain", "pith"}
    if {name, class_of(name)} & words:
        raise _refused(name, "a word of Python", f"{spelled(name)}_model")
    if not FORM.fullmatch(name) or len(name) > MOST_LETTERS:
        raise _refused(name, "no such name", spelled(name))


def spelled(name: str) -> str:
    """The nearest name of the right form: Mixtral-8x7B becomes mixtral_8x7b."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    whole = plain if plain[:1].isalpha() else f"model_{plain}".strip("_")
    return whole[:MOST_LETTERS].strip("_")


def check_meaning(name: str, *, shared: Mapping[str, str]) -> None:
    """Raise RequestError where the file or class of a new family would hide another thing, in the
    `shared` modules, path to text, where the names of all families meet, or in its own."""
    for place, text in shared.items():
        if taken := {name, class_of(name)} & _bound(ast.parse(text)):
            found = f"{', '.join(sorted(taken))} of {place}"
            raise _refused(name, found, f"{name}_model"[:MOST_LETTERS])
    if class_of(name) in IN_ITS_FILES:
        found = f"{class_of(name)}, which its own files import"
        raise _refused(name, found, f"{name}_model"[:MOST_LETTERS])


def _bound(tree: ast.Module) -> set[str]:
    """The names that a module gives a meaning to, at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


def _refused(name: str, found: str, nearest: str) -> RequestError:
    return RequestError(
        "scaffold.name",
        what=f"no family can be called {name[:80]!r}",
        found=found,
        wanted=f"a free name of a-z, 0-9 and single _, at most {MOST_LETTERS}, a letter first",
        where="NAME",
        next_step=f"pith add-model {nearest} --config CONFIG",
    )
