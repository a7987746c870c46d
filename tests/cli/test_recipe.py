"""`pith recipe`: words on stderr, one JSON object on stdout, resolved values that load back."""

import json

import pytest
from typer.testing import CliRunner

from pith.cli.recipe import recipe_app
from pith.config import Recipe, shipped
from pith.errors import RequestError


def invoke(*args):
    result = CliRunner().invoke(recipe_app(), args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list_names_every_shipped_recipe():
    result = invoke("list", "--json")
    report = json.loads(result.stdout)
    assert report["verb"] == "recipe list"
    assert report["ok"] is True
    assert [recipe["recipe"] for recipe in report["data"]["recipes"]] == list(shipped())
    assert all(name in result.stderr for name in shipped())


def test_show_prints_a_recipe_that_loads_back(tmp_path):
    result = invoke("show", "tiny-moe", "--set", "training.steps=70")
    assert result.stdout == ""
    path = tmp_path / "recipe.toml"
    path.write_text(result.stderr)
    assert Recipe.load(path) == Recipe.load("tiny-moe", ["training.steps=70"])


def test_show_reports_the_values(tmp_path):
    out = tmp_path / "report.json"
    data = json.loads(invoke("show", "tiny-moe", "--json", "--out", str(out)).stdout)["data"]
    assert data["values"]["training"]["steps"] == Recipe.load("tiny-moe").training.steps
    assert data["digest"] == Recipe.load("tiny-moe").digest()
    assert json.loads(out.read_text())["data"] == data


def test_schema_is_the_recipe_schema():
    report = json.loads(invoke("schema", "--json").stdout)
    assert report["data"]["schema"] == Recipe.json_schema()


@pytest.mark.parametrize("args", [("show", "no-such"), ("show", "tiny-moe", "--set", "a.b=1")])
def test_a_wrong_request_raises(args):
    with pytest.raises(RequestError) as caught:
        invoke(*args)
    assert caught.value.exit_status == 2
