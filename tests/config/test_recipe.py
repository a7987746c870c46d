"""The recipe as a value: complete when loaded, equal after a round trip, told by its schema."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from pith.config import Recipe, shipped
from pith.errors import RequestError
from pith.schedule.build import SCHEDULES
from pith.schedule.simulate import simulate

SOUND = Path(__file__).parent / "sound"
RECIPES = Path(importlib.import_module("pith").__file__).parent / "recipes"


def saved(recipe, folder):
    path = folder / "config.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.clip=none", "data.epochs=3", "checkpoint.directory=some where", "log.every=7"),
        ("model.fields.num_hidden_layers=14", "optimizer.betas=[0.8, 0.99]", "data.seed=5"),
    ],
)
def test_a_resolved_recipe_loads_back_equal(name, overrides, tmp_path):
    recipe = Recipe.load(name, overrides)
    again = Recipe.load(saved(recipe, tmp_path))
    assert again == recipe
    assert again.digest() == recipe.digest()
    assert again.name == name


def test_a_resolved_recipe_needs_no_other_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(Recipe.load("tiny-moe"), tmp_path)
    assert "config" not in tomllib.loads(path.read_text())["model"]
    assert Recipe.load("config.toml").architecture == Recipe.load("tiny-moe").architecture


def test_the_digest_tells_recipes_apart():
    changed = {
        Recipe.load(SOUND, [text]).digest()
        for text in ("training.seed=1", "model.fields.rope_theta=5.0", "optimizer.lr=0.1")
    }
    assert len(changed | {Recipe.load(SOUND).digest()}) == 4


def test_overrides_are_toml_values_or_bare_words():
    recipe = Recipe.load(
        SOUND,
        [
            "data.corpus=/some/where",
            'log.directory="a b"',
            "training.deterministic=true",
            "optimizer.lr=1",
            "training.clip=none",
            "parallel.layers_per_stage=[0, 2, 2, 0]",
            "operators.attention=reference",
            "training.steps = 70",
        ],
    )
    assert recipe.data.corpus == "/some/where"
    assert recipe.log.directory == "a b"
    assert recipe.training.deterministic is True
    assert recipe.optimizer.lr == 1.0
    assert recipe.training.clip is None
    assert recipe.parallel.layers_per_stage == (0, 2, 2, 0)
    assert recipe.operators == {"attention": "reference"}
    assert recipe.training.steps == 70


def test_the_last_override_of_a_key_holds():
    assert Recipe.load(SOUND, ["training.steps=70", "training.steps=80"]).training.steps == 80


def test_another_model_config_replaces_the_fields_of_a_resolved_recipe(tmp_path):
    path = saved(Recipe.load(SOUND), tmp_path)
    config = RECIPES / "qwen3-0.6b" / "config.json"
    recipe = Recipe.load(path, [f"model.config={config}", "model.fields.num_hidden_layers=5"])
    assert recipe.architecture.hidden_size == 1024
    assert recipe.architecture.num_layers == 5


def test_a_recipe_is_found_by_name_by_file_and_by_folder():
    named = Recipe.load("tiny-moe")
    assert Recipe.load(RECIPES / "tiny-moe") == named
    assert Recipe.load(str(RECIPES / "tiny-moe" / "recipe.toml")) == named


def test_a_recipe_is_named_after_its_file_or_folder(tmp_path):
    text = Recipe.load("tiny-moe").to_toml().replace('name = "tiny-moe"\n', "", 1)
    for place in ("My try (2)/recipe.toml", "other/My try (2).toml"):
        path = tmp_path / place
        path.parent.mkdir()
        path.write_text(text)
        assert Recipe.load(path).name == "My-try-2-"


def test_a_recipe_cannot_be_changed():
    recipe = Recipe.load(SOUND)
    with pytest.raises(ValidationError):
        recipe.training.steps = 3


def test_a_recipe_built_in_place_is_validated_too():
    tables = tomllib.loads(Recipe.load(SOUND).to_toml())
    tables["training"]["global_batch_size"] = 15
    with pytest.raises(RequestError) as caught:
        Recipe.model_validate(tables)
    assert [fault.where for fault in caught.value.faults] == ["training.global_batch_size"]


@pytest.mark.parametrize(
    ("overrides", "name", "num_stages"),
    [
        (["parallel.schedule=auto", "parallel.pp=1"], "1f1b-pair", 1),
        (["parallel.schedule=zbv"], "zbv", 4),
        (["parallel.schedule=interleaved"], "interleaved", 4),
        (["parallel.schedule=interleaved", "parallel.num_stages=6"], "interleaved", 6),
        (["parallel.schedule=zb-h1"], "zb-h1", 2),
    ],
)
def test_a_schedule_cuts_the_model_into_its_stages(overrides, name, num_stages):
    pipeline = Recipe.load(SOUND, overrides).pipeline()
    assert pipeline.table.name == name
    assert pipeline.table.placement.num_stages == len(pipeline.split) == num_stages
    assert len(pipeline.costs.f) == num_stages


def test_auto_takes_what_the_simulator_finds_best_at_the_costs_of_the_layers():
    many = ["parallel.schedule=auto", "training.global_batch_size=64"]
    alone = Recipe.load(SOUND, many).pipeline()
    assert alone.table == alone.choice.table
    assert alone.costs.pair == 1
    named = [
        simulate(pipeline.table, pipeline.costs).makespan
        for name in SCHEDULES
        if len(
            (pipeline := Recipe.load(SOUND, [*many, f"parallel.schedule={name}"]).pipeline()).split
        )
    ]
    assert simulate(alone.table, alone.costs).makespan <= min(named)
    spread = Recipe.load(SOUND, [*many, "parallel.ep=2"]).pipeline()
    assert spread.costs.pair < 1


def test_an_explicit_split_chooses_the_number_of_stages_for_auto():
    for lengths in ("[2, 2]", "[1, 1, 1, 1]"):
        pipeline = Recipe.load(
            SOUND, ["parallel.schedule=auto", f"parallel.layers_per_stage={lengths}"]
        ).pipeline()
        assert str([len(layers) for layers in pipeline.split]) == lengths


def test_an_explicit_split_is_used():
    recipe = Recipe.load(SOUND, ["parallel.layers_per_stage=[2, 0, 0, 2]"])
    assert [list(layers) for layers in recipe.pipeline().split] == [[0, 1], [], [], [2, 3]]


def test_what_cannot_be_trained_yet_is_named():
    assert Recipe.load(SOUND).not_trainable_yet() == ()
    spread = ["parallel.ep=2", "parallel.dp_shard=2", "parallel.exchange=splits"]
    assert Recipe.load(SOUND, spread, world_size=8).not_trainable_yet() == ()
    recipe = Recipe.load(SOUND, [*spread, "parallel.cp=2"], world_size=16)
    named = {fault.where: (fault.found, fault.nearest) for fault in recipe.not_trainable_yet()}
    assert named == {"parallel.cp": ("2", ("1",))}


def test_no_balance_loss_means_no_coefficient():
    assert Recipe.load(SOUND, ["balance.coefficient=0.5"]).balance_coefficient == 0.5
    none = ["balance.coefficient=0.5", "balance.scope=none"]
    assert Recipe.load(SOUND, none).balance_coefficient == 0.0


@pytest.mark.parametrize("name", shipped())
def test_the_schema_accepts_what_ships_and_what_is_resolved(name):
    schema = schema_validator()
    assert schema.is_valid(tomllib.loads((RECIPES / name / "recipe.toml").read_text()))
    changed = ["training.clip=none", "balance.z_loss=0.1", "parallel.exchange=splits"]
    assert schema.is_valid(tomllib.loads(Recipe.load(name, changed).to_toml()))


@pytest.mark.parametrize(
    "change",
    [
        {"trainig": {}},
        {"training": {"steps": 3}},
        {"balance": {"scope": "global_batch"}},
        {"balance": {"bias_update": 0.1}},
        {"balance": {"z_loss": -0.1}},
        {"parallel": {"exchange": "deepep"}},
        {"parallel": {"dp_shard": 0}},
        {"parallel": {"schedule": "dualpipe"}},
        {"parallel": {"pp": 0}},
        {"data": {"corpus": 3}},
    ],
)
def test_the_schema_refuses_what_the_recipe_refuses(change):
    tables = tomllib.loads(Recipe.load(SOUND).to_toml()) | change
    assert not schema_validator().is_valid(tables)
    with pytest.raises((ValidationError, RequestError)):
        Recipe.model_validate(tables)


def schema_validator():
    jsonschema = importlib.import_module("jsonschema")
    schema = Recipe.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_torch_free_rooms_import_no_torch_and_quickly():
    code = (
        "import sys, time; start = time.process_time()\n"
        "import pith.config, pith.plan.dry_run, pith.arch, pith.cli.dry_run, pith.cli.recipe\n"
        "pith.config.Recipe.load('qwen3-30b-a3b').pipeline().split\n"
        "heavy = {'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time() - start < 3)"
    )
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.split() == ["[]", "True"]
