"""From a name and a config to the changes that they make in a checkout; nothing is written."""

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pith
from pith.arch.fields import FieldReader
from pith.disk import require_regular
from pith.errors import Fault, RequestError, UnavailableError, shown
from pith.scaffold import arms, names
from pith.scaffold.changes import Change
from pith.scaffold.facts import read_balance
from pith.scaffold.family import Family, family_of, start_of
from pith.scaffold.given import Given, parse
from pith.scaffold.texts import config_path, facts_path, facts_text, new_files

# What an installed package does not have beside it.
CHECKOUT = ("pyproject.toml", "AGENTS.md", "tests/models")


def checkout() -> Path:
    """The root of the checkout that this package runs from. Raises UnavailableError where it is
    an installed one."""
    root = Path(pith.__file__).resolve().parent.parent
    missing = [name for name in CHECKOUT if not (root / name).exists()]
    if missing:
        raise UnavailableError(
            "scaffold.no_checkout",
            what="a family is added to a checkout of pith, and this is an installed package",
            found=f"no {', '.join(missing)} beside it",
            wanted="a checkout",
            where=str(root),
            next_step="git clone the repository, pip install -e '.[dev]' there, and run it again",
        )
    return root


def plan(name: str, given: Given, *, like: str | None, root: Path) -> tuple[Family, list[Change]]:
    """The family, and every file that it has or touches, in the order of writing.

    The shared files come last: a family that is half written is one that nothing imports. Raises
    RequestError where the name, the model type, the family to begin with or a value of the config
    cannot be, UnavailableError where a file of the checkout is none or cannot be read.
    """
    names.check_form(name)
    shared = {path: _python(root, path) for path in (arms.ARCH, arms.BUILD)}
    _refuse_other_config(name, given, root=root)
    _refuse_served(name, given.model_type)
    family = Family(name, given, start_of(given.fields, like=_other(like, name)))
    if not (root / facts_path(name)).exists():
        names.check_meaning(name, shared=shared)
        _refuse_impossible(family)
    changes = [
        Change(path, _content(root / path), after, is_shared=False)
        for path, after in new_files(family).items()
    ]
    for path, insert in ((arms.ARCH, arms.with_arch), (arms.BUILD, arms.with_build)):
        after = insert(shared[path], family).encode()
        changes.append(Change(path, shared[path].encode(), after, is_shared=True))
    return family, changes


def _other(like: str | None, name: str) -> str | None:
    if like == name:
        fault = Fault("--like", repr(like), "another family than the new one")
        raise RequestError("scaffold.like", what=str(fault), faults=(fault,))
    return like


def _refuse_other_config(name: str, given: Given, *, root: Path) -> None:
    """A family is made from one config, which its recipe keeps; without one it is not made here."""
    kept = _content(root / config_path(name))
    files = [
        path for path in (facts_path(name), f"pith/models/{name}.py") if (root / path).exists()
    ]
    if kept is None and files:
        raise _taken(name, f"{files[0]}, which was not made by add-model", ())
    if kept is None:
        return
    try:
        before = parse(kept)
    except (ValueError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise _taken(name, f"{config_path(name)}, which cannot be read", ())
    faults = tuple(_differences(given.fields, before))
    if faults:
        raise _taken(name, f"a family that was made from another config ({faults[0]})", faults)


def _differences(given: Mapping[str, Any], kept: Mapping[str, Any]) -> list[Fault]:
    def told(config: Mapping[str, Any], key: str) -> str:
        return shown(config[key]) if key in config else "nothing"

    return [
        Fault(key, f"{told(given, key)} in --config", f"{told(kept, key)} as it was made")
        for key in sorted({*given, *kept})
        if (key in given, given.get(key)) != (key in kept, kept.get(key))
    ]


def _refuse_served(name: str, model_type: str) -> None:
    family = family_of(model_type)
    if family not in (None, name):
        fault = Fault("model_type", repr(model_type), "one that no family serves yet")
        raise RequestError(
            "scaffold.served",
            what=f"the family {family} serves model_type {model_type!r} already",
            where="--config",
            next_step=f"pith check model {family}",
            faults=(fault,),
        )


def _refuse_impossible(family: Family) -> None:
    """Run the facts of the family before they are a file; a key that they miss is for later, as it
    may stand there under another name, but a value that is there and cannot be is refused."""
    module: dict[str, Any] = {"__name__": f"pith.arch.{family.name}"}
    exec(facts_text(family), module)
    fields = FieldReader(family.given.fields)
    module[family.class_name].examine(fields)
    read_balance(fields)
    faults = tuple(f for f in fields.faults if family.given.fields.get(f.where) is not None)
    if faults:
        count = f"{len(faults)} values" if len(faults) > 1 else "a value"
        raise RequestError(
            "scaffold.impossible",
            what=f"the config has {count} that no model can have",
            where="--config",
            next_step="correct the config, or take it from the Hub once more",
            faults=faults,
        )


def _taken(name: str, found: str, faults: tuple[Fault, ...]) -> RequestError:
    return RequestError(
        "scaffold.taken",
        what=f"there is a family or file of the name {name!r}",
        found=found,
        wanted="a free name, or the config that it was made from",
        where="NAME",
        next_step="name it otherwise, or take its files away first",
        faults=faults,
    )


def _python(root: Path, path: str) -> str:
    """The text of a module that all families share."""
    content = _content(root / path)
    if content is None:
        raise _unreadable(path, "nothing")
    try:
        text = content.decode()
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise _unreadable(path, f"no Python ({error})") from error
    return text


def _content(path: Path) -> bytes | None:
    """What is in a file of the checkout, None where there is none."""
    try:
        require_regular(path)
        return path.read_bytes() if os.path.lexists(path) else None
    except OSError as error:
        raise _unreadable(str(path), error.strerror or str(error)) from error


def _unreadable(where: str, found: str) -> UnavailableError:
    return UnavailableError(
        "scaffold.unreadable",
        what="a file of the checkout is not as a family needs it",
        found=found,
        wanted="a file that can be read, in the layout that pith ships",
        where=where,
        next_step="mend it or move it away, then run it again",
    )
