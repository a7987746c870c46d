"""The plan of every shipped recipe, on a machine without torch or GPU, adds up."""

import json

import pytest

from pith.cli.dry_run import _short, dry_run
from pith.config import Recipe, shipped
from pith.errors import RequestError


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_has_a_plan_that_adds_up(name):
    recipe = Recipe.load(name)
    data, text = dry_run(recipe)
    model, batch, stages = data["model"], data["batch"], data["stages"]
    assert json.loads(json.dumps(data)) == data
    assert model["flops_per_step"] == model["flops_per_token"] * batch["tokens_per_step"]
    assert sum(stage["flops_share"] for stage in stages) == pytest.approx(1.0)
    assert sum(stage["num_layers"] for stage in stages) == recipe.architecture.num_layers
    assert sum(stage["num_parameters"] for stage in stages) == model["num_parameters"]
    assert len(data["rows"]) == data["layout"]["pp"]
    assert len(stages) == data["num_stages"]
    assert data["world_size"] == recipe.mesh().world_size
    assert name in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_30b_plan_shows_the_figures_that_people_check():
    data, text = dry_run(Recipe.load("qwen3-30b-a3b"))
    assert "30.5 G parameters, 3.35 G active" in text
    assert "23.1 GFLOPs per token" in text
    assert "8 ranks = pp 2 x dp 1 x cp 1 x ep 4" in text
    assert [stage["rank"] for stage in data["stages"]] == [0, 1, 1, 0]
    assert [stage["num_layers"] for stage in data["stages"]] == [13, 13, 13, 9]


def test_a_tied_head_is_held_a_second_time_on_another_stage():
    recipe = Recipe.load("qwen3-0.6b", ["parallel.pp=2"])
    data, _ = dry_run(recipe)
    held = sum(stage["num_parameters"] for stage in data["stages"])
    assert held - data["model"]["num_parameters"] == 151936 * 1024


def test_more_ranks_are_more_data_ranks():
    data, _ = dry_run(Recipe.load("tiny-moe", ["training.global_batch_size=16"]), world_size=8)
    assert data["layout"] == {"pp": 2, "dp": 2, "cp": 1, "ep": 2}
    assert data["batch"]["data_ranks"] == 4
    assert data["num_micro_batches"] == data["batch"]["num_micro_batches"] == 4


def test_what_training_would_refuse_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where nothing is called "corpus"
    data, text = dry_run(Recipe.load("qwen3-30b-a3b", ["model.fields.fancy=1", "parallel.cp=2"]))
    assert [warning.partition(":")[0] for warning in data["warnings"]] == [
        "parallel.cp",
        "data.corpus",
        "model.fields",
    ]
    assert all(warning in text for warning in data["warnings"])
    assert dry_run(Recipe.load("tiny-moe"))[0]["warnings"] == []


def test_a_world_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match="multiple of pp"):
        dry_run(Recipe.load("tiny-moe"), world_size=3)


def test_a_model_larger_than_any_prefix_still_has_a_plan():
    largest = 2**31 - 1
    fields = [f"model.fields.{name}={largest}" for name in ("hidden_size", "vocab_size")]
    data, text = dry_run(Recipe.load("tiny-moe", [*fields, "training.sequence_length=2"]))
    assert data["model"]["num_parameters"] > largest**2
    assert " Z" in text or " E" in text
    assert _short(10**40) == "1e+10 Q"
    assert [_short(n) for n in (0, 999, 999_600, 4_040_000)] == ["0 ", "999 ", "1 M", "4.04 M"]
