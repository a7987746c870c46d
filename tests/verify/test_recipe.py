"""`pith check recipe`: what is shipped holds, and what is wrong with a recipe is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pith.cli import check
from pith.cli.app import run
from pith.config import Recipe, shipped
from pith.errors import RequestError
from pith.schedule.table import Table
from pith.verify import recipe as verify_recipe

BROKEN = Path(__file__).parents[1] / "broken" / "recipes"
SOUND = Path(__file__).parents[1] / "config" / "sound"
CHECKS = {
    *("recipe loads", "recipe round trip", "recipe schema as written"),
    *("recipe schema as resolved", "recipe dry run", "recipe schedule", "recipe model fields"),
}


@pytest.fixture
def report_of(capsys) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """report_of("tiny-moe", ...): exit status and checks of the command."""

    def report(*names: str | Path) -> tuple[int, list[dict[str, Any]]]:
        status = run(["check", "recipe", *map(str, names), "--json"])
        return status, json.loads(capsys.readouterr().out)["checks"]

    return report


def failed(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {c["name"]: c["found"] for c in checks if not c["ok"]}


def test_every_shipped_recipe_holds(report_of) -> None:
    status, checks = report_of()

    assert failed(checks) == {}
    assert status == 0
    of = {name: {c["name"] for c in checks if c["where"] == name} for name in shipped()}
    assert of.pop("tiny-moe") == CHECKS | {"recipe vocabulary"}
    assert of
    assert all(names == CHECKS for names in of.values())


def test_a_recipe_at_a_path_is_checked_alone_and_reported_to_a_file(report_of, tmp_path) -> None:
    status, checks = report_of(SOUND, "--out", tmp_path / "report.json")

    assert (status, failed(checks)) == (0, {})
    assert {c["where"] for c in checks} == {str(SOUND)}
    assert json.loads((tmp_path / "report.json").read_text())["checks"] == checks


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.toml")), ids=lambda path: path.stem)
def test_the_faults_of_a_broken_recipe_stand_in_its_failed_check(report_of, path: Path) -> None:
    named = path.read_text().splitlines()[0].removeprefix("# faults: ").split(", ")

    status, checks = report_of(path)

    assert status == 1
    assert list(failed(checks)) == ["recipe loads"]
    assert all(f"{name}: found" in checks[0]["found"] for name in named)


def test_a_recipe_that_is_no_toml_fails_and_one_that_is_not_there_is_exit_2(
    report_of, tmp_path, capsys
) -> None:
    (tmp_path / "cut.toml").write_text('[model]\nconfig = "conf')

    status, checks = report_of(tmp_path / "cut.toml", "tiny-moe")

    assert status == 1
    assert list(failed(checks)) == ["recipe loads"]
    assert run(["check", "recipe", "tiny-moe", "tiny-mo"]) == 2
    assert "nearest valid: tiny-moe" in capsys.readouterr().err


def test_a_field_of_the_model_that_nobody_reads_is_found(report_of, tmp_path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(SOUND, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"wings": 2}))

    status, checks = report_of(folder)

    assert (status, failed(checks)) == (1, {"recipe model fields": "not read: wings"})


def refuse(*_: Any) -> Any:
    raise RequestError("x", what="no plan")


def no_rows(_: Recipe) -> tuple[dict[str, Any], str]:
    return {"rows": [], "world_size": 4, "schedule": "dualpipev"}, ""


@pytest.mark.parametrize(
    ("place", "broken", "failing"),
    [
        ((check, "dry_run"), refuse, "recipe dry run"),
        ((check, "dry_run"), no_rows, "recipe dry run"),
        ((Recipe, "to_toml"), lambda _: "name = 'other'", "recipe round trip"),
        (
            (verify_recipe, "ByteTokenizer"),
            lambda: SimpleNamespace(vocab_size=100_000),
            "recipe vocabulary",
        ),
    ],
)
def test_what_a_recipe_promises_is_looked_at(
    monkeypatch, report_of, *, place: tuple[Any, str], broken: Any, failing: str
) -> None:
    monkeypatch.setattr(*place, broken)

    status, checks = report_of("tiny-moe")

    assert status == 1
    assert failing in failed(checks)


def test_a_value_that_is_lost_on_the_way_and_a_schema_that_refuses_are_found(
    monkeypatch, report_of
) -> None:
    to_toml, schema = Recipe.to_toml, Recipe.json_schema()
    monkeypatch.setattr(
        Recipe, "to_toml", lambda self: to_toml(self).replace("lr = 0.002", "lr = 1.0")
    )
    monkeypatch.setattr(Recipe, "json_schema", lambda: schema | {"required": ["wings"]})

    status, checks = report_of("tiny-moe")

    assert status == 1
    assert failed(checks)["recipe round trip"] == "another optimizer"
    assert "'wings' is a required property" in failed(checks)["recipe schema as written"]
    assert "'wings' is a required property" in failed(checks)["recipe schema as resolved"]


def test_a_table_that_breaks_an_invariant_is_found(monkeypatch, report_of) -> None:
    real = Recipe.pipeline

    def shortened(self: Recipe, world_size: int | None = None) -> Any:
        pipeline = real(self, world_size)
        table: Table = pipeline.table
        rows = (table.rows[0][:-1], *table.rows[1:])
        object.__setattr__(table, "rows", rows)
        return pipeline

    monkeypatch.setattr(Recipe, "pipeline", shortened)

    status, checks = report_of("tiny-moe")

    assert status == 1
    assert failed(checks)["recipe schedule"].startswith("weights: rank 0")
