"""Where a recipe comes from: a shipped name or a file, single values changed, the model read."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pith.errors import Fault, RequestError, shown

# Not UTF-8, not TOML or JSON, more digits than Python converts, brackets deeper than its stack.
UNREADABLE = (ValueError, RecursionError)
MAX_LEVELS = 64
MAX_BITS = 1024


def shipped() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    folders = (files("pith") / "recipes").iterdir()
    return tuple(sorted(f.name for f in folders if (f / "recipe.toml").is_file()))


def read(name: str) -> tuple[dict[str, Any], Traversable]:
    """The raw tables of a recipe and the folder that it stands in."""
    source: Traversable = files("pith") / "recipes" / name / "recipe.toml"
    if name not in shipped():
        path = Path(name)
        source = path / "recipe.toml" if os.path.isdir(name) else path
    try:
        raw = tomllib.loads(source.read_bytes().decode())
    except OSError as error:
        names = tuple(get_close_matches(name, shipped(), cutoff=0.4)) or shipped()
        wanted = f"a path, or one of {', '.join(shipped())}"
        fault = Fault("recipe", shown(name), wanted, names)
        raise RequestError(
            "recipe.not_found", what="no such recipe", next_step="pith recipe list", faults=(fault,)
        ) from error
    except UNREADABLE as error:
        fault = Fault(repr(str(source))[1:-1], str(error), "TOML in UTF-8")
        raise RequestError("recipe.unreadable", what=str(fault), faults=(fault,)) from error
    path = Path(str(source)).absolute()
    stem = path.parent.name if path.name == "recipe.toml" else path.stem
    raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "recipe")
    return raw, Path(path.parent)


def override(raw: dict[str, Any], overrides: Sequence[str]) -> Iterator[Fault]:
    """Write "a.b=value" texts into `raw`."""
    for text in overrides:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            yield Fault("--set", shown(text), "section.key=value")
            continue
        if path == ["model", "config"]:
            raw["model"] = {"config": str(Path(value.strip()).absolute())}
            continue
        table: Any = raw
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            yield Fault(key, "a key below a single value", "section.key=value")
            continue
        try:
            table[path[-1]] = _toml_value(value.strip())
        except UNREADABLE as error:
            yield Fault(key, f"{value[:20]!r}... ({error})", "a TOML value or a bare word")


def _toml_value(text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tables["value"] if len(tables) == 1 else text


def resolve_model(raw: dict[str, Any], folder: Traversable) -> Iterator[Fault]:
    """Put the fields of the model config into `raw` in place of the file's name."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config"), str):
        return
    source = folder / model.pop("config")
    try:
        text = source.read_bytes().decode()
        loaded = without_nulls(json.loads(text, parse_constant=_refuse_constant))
    except (OSError, *UNREADABLE) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        yield Fault("model.config", f"{source} ({cause})", "a Hugging Face config.json")
        return
    if not isinstance(loaded, dict):
        yield Fault("model.config", f"{source} (no object)", "a Hugging Face config.json")
        return
    changes = model.get("fields", {})
    model["fields"] = loaded | changes if isinstance(changes, dict) else changes


def refuse_boundless(table: dict[str, Any], where: str = "") -> Iterator[Fault]:
    """Take out of the sections of a recipe each value that could be neither shown nor written."""
    for key, value in list(table.items()):
        if isinstance(value, dict) and not where:
            yield from refuse_boundless(value, f"{key}.")
        elif not _is_bounded(value, MAX_LEVELS):
            del table[key]
            wanted = f"at most {MAX_LEVELS} levels, and integers of at most {MAX_BITS} bits"
            yield Fault(f"{where}{key}", "a value nested too deep, or too large", wanted)


def _is_bounded(value: Any, levels: int) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_bounded(item, levels - 1) for item in items)
    return not isinstance(value, int) or value.bit_length() <= MAX_BITS


def without_nulls(value: Any) -> Any:
    """The same JSON value less every null: TOML has none, and to a config absent means null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value if item is not None]
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
