"""What is wrong with a recipe, in words: pydantic's errors as faults, with values that would do."""

import re
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pith.config.sections import Section
from pith.errors import Fault, RequestError, shown


def invalid(faults: tuple[Fault, ...]) -> RequestError:
    """The one error that carries all `faults` of a recipe."""
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    return RequestError("recipe.invalid", what=f"the recipe has {count}", faults=faults)


def fault(tables: type[Section], entry: ErrorDetails) -> Fault:
    """One error that pydantic found while reading `tables`."""
    where = ".".join(str(part) for part in entry["loc"])
    match entry["type"]:
        case "missing":
            return Fault(where, "nothing", "a value", _suggestions(tables, entry))
        case "extra_forbidden":
            nearest = _similar_keys(tables, where)
            return Fault(where, "an unknown key", "a key of the recipe", nearest)
        case "model_type":
            return Fault(where, shown(entry["input"]), "a table")
        case _:
            wanted = entry["msg"].removeprefix("Input should be ")
            return Fault(where, shown(entry["input"]), wanted, _suggestions(tables, entry))


def repair(tables: type[Section], raw: dict[str, Any], entry: ErrorDetails) -> None:
    """Take the faulty value out of `raw`; a missing one gets its example."""
    section, *rest = (str(part) for part in entry["loc"][:2])
    if not rest:
        raw.pop(section, None)
        if entry["type"] in ("missing", "model_type"):
            raw[section] = {}
    elif entry["type"] == "missing":
        raw[section][rest[0]] = _example(tables, entry)
    else:
        raw[section].pop(rest[0], None)


def _suggestions(tables: type[Section], entry: ErrorDetails) -> tuple[str, ...]:
    """The nearest choice or bound, else the field's example or default."""
    context = entry.get("ctx", {})
    if choices := re.findall("'([^']*)'", str(context.get("expected", ""))):
        close = get_close_matches(str(entry["input"]), choices, n=1, cutoff=0.5)
        return tuple(close or choices)
    if bound := [context[name] for name in ("ge", "le") if name in context]:
        return (str(bound[0]),)
    example = _example(tables, entry)
    return () if example is None or isinstance(example, dict | BaseModel) else (str(example),)


def _example(tables: type[Section], entry: ErrorDetails) -> Any:
    """A value that would do where `entry` stands, None where nothing is known."""
    section, *rest = (str(part) for part in entry["loc"])
    fields = _keys(tables.model_fields[section]) if rest else tables.model_fields
    field = fields.get(rest[0] if rest else section)
    if field is None or (field.is_required() and not field.examples):
        return None
    return field.examples[0] if field.examples else field.get_default(call_default_factory=True)


def _similar_keys(tables: type[Section], where: str) -> tuple[str, ...]:
    """The keys of the same name in another table, else those spelt alike."""
    sections = tables.model_fields
    keys = [f"{name}.{key}" for name, field in sections.items() for key in _keys(field)]
    same = [key for key in keys if key.endswith("." + where.rpartition(".")[2])]
    return tuple(same or get_close_matches(where, [*keys, *sections], n=3, cutoff=0.5))


def _keys(field: FieldInfo) -> dict[str, FieldInfo]:
    """The fields of the table that stands in `field`; none if it holds a single value."""
    kind: Any = field.annotation
    is_table = isinstance(kind, type) and issubclass(kind, Section)
    return dict(kind.model_fields) if is_table else {}
