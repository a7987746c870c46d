"""What a recipe must be: readable, equal after a round trip, and a plan that can be run."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pith.config import Recipe, source
from pith.data.tokenizer import ByteTokenizer
from pith.errors import RequestError, UnavailableError
from pith.report import Check
from pith.schedule.verify import verify

DryRun = Callable[[Recipe], Mapping[str, Any]]


def check_recipe(name: str, *, dry_run: DryRun) -> Iterator[Check]:
    """Every check of the shipped recipe `name`, or of the file or folder at that path.

    `dry_run` gives the plan on the fewest ranks as data. A recipe that does not load has one
    check, which failed. Raises RequestError where there is no such recipe.
    """
    try:
        recipe = Recipe.load(name)
    except RequestError as error:
        if error.code == "recipe.not_found":
            raise
        found = "; ".join(map(str, error.faults)) or error.what
        yield Check("recipe loads", False, found, "no fault", name)
        return
    yield Check(
        "recipe loads", True, f"{recipe.architecture.num_parameters():,} parameters", "", name
    )
    yield _round_trip(recipe, name)
    yield from _schema(recipe, name)
    yield _plan(recipe, name, dry_run)
    yield _schedule(recipe, name)
    yield _fields(recipe, name)
    if recipe.data.corpus == "embedded":
        yield _vocabulary(recipe, name)


def _round_trip(recipe: Recipe, name: str) -> Check:
    """What the recipe writes of itself is read as an equal value."""
    title, wanted = "recipe round trip", "the same value from what it writes"
    try:
        again = Recipe.parse(recipe.to_toml())
    except (RequestError, ValueError) as error:
        return Check(title, False, str(error), wanted, name)
    before, after = recipe.model_dump(mode="json"), again.model_dump(mode="json")
    changed = [key for key in before if before[key] != after.get(key)]
    equal = again == recipe and not changed
    return Check(
        title, equal, f"another {', '.join(changed)}" if not equal else "equal", wanted, name
    )


def _schema(recipe: Recipe, name: str) -> Iterator[Check]:
    """The file and the resolved recipe are what the published JSON schema describes."""
    try:
        from jsonschema import Draft202012Validator  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            "check.jsonschema",
            what="recipes cannot be held against their schema without jsonschema",
            next_step="pip install jsonschema",
        ) from error
    validator = Draft202012Validator(Recipe.json_schema())
    texts = {"as written": source.read(name)[0], "as resolved": tomllib.loads(recipe.to_toml())}
    for how, tables in texts.items():
        errors = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(tables)]
        found = "; ".join(errors) or "accepted"
        yield Check(f"recipe schema {how}", not errors, found, "accepted by the schema", name)


def _plan(recipe: Recipe, name: str, dry_run: DryRun) -> Check:
    """The dry run on the fewest ranks gives one row for every pipeline rank."""
    title, wanted = "recipe dry run", f"a plan of {recipe.parallel.pp} pipeline ranks"
    try:
        plan = dry_run(recipe)
    except RequestError as error:
        return Check(title, False, str(error), wanted, name)
    rows, ranks = plan["rows"], plan["world_size"]
    whole = len(rows) == recipe.parallel.pp and all(rows) and ranks == recipe.mesh().world_size
    found = f"{ranks} ranks, {len(rows)} pipeline ranks, {plan['schedule']}"
    return Check(title, whole, found, wanted, name)


def _schedule(recipe: Recipe, name: str) -> Check:
    """The table that the recipe runs breaks no invariant of schedules."""
    pipeline = recipe.pipeline()
    violations = verify(pipeline.table, costs=pipeline.costs)
    found = "; ".join(map(str, violations[:3])) or f"{pipeline.table.name}, none broken"
    return Check("recipe schedule", not violations, found, "no violation", name)


def _fields(recipe: Recipe, name: str) -> Check:
    """Every field of the model config is read, or known to change nothing."""
    ignored = recipe.architecture.ignored
    found = f"not read: {', '.join(ignored)}" if ignored else "all read"
    return Check("recipe model fields", not ignored, found, "no field that nobody reads", name)


def _vocabulary(recipe: Recipe, name: str) -> Check:
    """The model has a row for every token of the embedded corpus."""
    size, needed = recipe.architecture.vocab_size, ByteTokenizer().vocab_size
    return Check("recipe vocabulary", size >= needed, str(size), f"{needed} or more", name)
