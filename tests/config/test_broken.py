"""Recipes that must be refused: every fault named at once, quickly, with what would be valid."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pith.config import Recipe
from pith.errors import RequestError

SOUND = Path(__file__).parent / "sound"
BROKEN = sorted((Path(__file__).parents[1] / "broken" / "recipes").glob("*.toml"))


def refused(name, *overrides, world_size=None):
    with pytest.raises(RequestError) as caught:
        Recipe.load(name, overrides, world_size)
    return caught.value


def faults_of(name, *overrides, world_size=None):
    error = refused(name, *overrides, world_size=world_size)
    assert error.exit_status == 2
    return {fault.where: fault for fault in error.faults}


def test_there_are_at_least_ten_impossible_recipes():
    assert len(BROKEN) >= 10


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_every_fault_of_an_impossible_recipe_is_named_at_once(path):
    named = path.read_text().splitlines()[0].removeprefix("# faults: ").split(", ")
    start = time.monotonic()
    error = refused(path)
    assert time.monotonic() - start < 5
    assert error.code == "recipe.invalid"
    assert sorted(fault.where for fault in error.faults) == sorted(named)
    assert all(fault.found and fault.wanted for fault in error.faults)
    assert all("\n" not in str(fault) for fault in error.faults)


@pytest.mark.parametrize(
    ("override", "where", "nearest"),
    [
        ("training.global_batch_size=15", "training.global_batch_size", ("14", "16")),
        ("training.global_batch_size=1", "training.global_batch_size", ("2",)),
        ("training.sequence_length=3000", "training.sequence_length", ("2048",)),
        ("model.fields.num_experts_per_tok=9", "model.fields.num_experts_per_tok", ("8",)),
        ("model.fields.num_key_value_heads=4", "model.fields.num_key_value_heads", ("3", "6")),
        ("parallel.schedule=dualpip", "parallel.schedule", ("dualpipev",)),
        ("parallel.pp=4", "parallel.pp", ("3",)),
        ("parallel.layers_per_stage=[1,1]", "parallel.layers_per_stage", ("[1, 1, 1, 1]",)),
        ("optimizer.warmup_steps=61", "optimizer.warmup_steps", ("60",)),
        ("optimizer.decay_steps=56", "optimizer.decay_steps", ("55",)),
        ("data.validation=0.6", "data.validation", ("0.5",)),
        ("training.lr=1", "training.lr", ("optimizer.lr",)),
        ("trainings.steps=1", "trainings", ("training",)),
    ],
)
def test_a_fault_offers_the_nearest_valid_values(override, where, nearest):
    fault = faults_of(SOUND, override)[where]
    assert fault.nearest[: len(nearest)] == nearest


def test_the_nearest_values_are_accepted():
    for override in ("training.global_batch_size=15", "parallel.cp=3", "training.steps=24"):
        (fault,) = faults_of(SOUND, override).values()
        for value in fault.nearest:
            assert Recipe.load(SOUND, [override, f"{fault.where}={value}"])


@pytest.mark.parametrize(
    ("world_size", "nearest"), [(3, ("2", "4")), (1, ("2",)), (0, ("2",)), (-2, ("2",))]
)
def test_a_world_that_is_no_multiple_of_the_layout_is_refused(world_size, nearest):
    fault = faults_of(SOUND, world_size=world_size)["world_size"]
    assert set(nearest) <= set(fault.nearest)


def test_data_ranks_of_the_world_enter_the_batch_check():
    assert Recipe.load(SOUND, world_size=8).batch(8).num_micro_batches == 2
    assert set(faults_of(SOUND, world_size=6)) == {"training.global_batch_size"}


def test_a_share_of_data_ranks_is_judged_beside_the_batch():
    both = ("parallel.dp_shard=3", "training.global_batch_size=15")
    assert set(faults_of(SOUND, *both, world_size=8)) == {
        "parallel.dp_shard",
        "training.global_batch_size",
    }
    assert set(faults_of(SOUND, *both, world_size=7)) == {
        "world_size",
        "training.global_batch_size",
    }


def test_without_a_world_there_are_as_many_data_ranks_as_share_the_weights():
    recipe = Recipe.load(SOUND, ["parallel.dp_shard=2"])
    assert recipe.mesh().dp == 2
    assert Recipe.parse(recipe.to_toml(), 8) == recipe
    assert set(faults_of(SOUND, "parallel.dp_shard=2", world_size=2)) == {"parallel.dp_shard"}


@pytest.mark.parametrize("change", ["training.precision=float64", "model.fields.hidden_size=30"])
def test_a_library_kernel_is_refused_for_sizes_that_it_does_not_take(change):
    library = "operators.grouped_linear=library"
    assert Recipe.load("tiny-moe", [library]).operators == {"grouped_linear": "library"}
    fault = faults_of("tiny-moe", library, change)["operators.grouped_linear"]
    assert fault.nearest == ("reference",)


@pytest.mark.parametrize("text", ["steps", "=3", ".=3", "training..steps=3"])
def test_an_override_that_is_none_is_refused(text):
    assert "--set" in faults_of(SOUND, text)


def test_an_override_below_a_single_value_is_refused():
    assert "training.steps.more" in faults_of(SOUND, "training.steps.more=3")


def test_an_unknown_name_lists_what_is_shipped():
    error = refused("tiny-mo")
    assert error.code == "recipe.not_found"
    assert error.faults[0].nearest[0] == "tiny-moe"
    assert error.next_step == "pith recipe list"


DIGITS, BRACKETS = "9" * 5000, "[" * 3000


@pytest.mark.parametrize(
    ("override", "where"),
    [
        (f"training.steps={DIGITS}", "training.steps"),
        (f"training.steps={BRACKETS}", "training.steps"),
        (f"training.steps=0x{DIGITS}", "training.steps"),
        (f"model.fields.hidden_size=0x{DIGITS}", "model.fields"),
        (f"parallel.layers_per_stage=[0x{DIGITS}]", "parallel.layers_per_stage"),
        (f"model.fields.x={'[' * 200}{']' * 200}", "model.fields"),
        (f"model.fields.{'a.' * 2000}a=3", "model.fields"),
        (f"{'a.' * 2000}a=3", "a.a"),
        ('data.corpus="a\\u0000b"', "data.corpus"),
        ('checkpoint.directory="a\\u0000b"', "checkpoint.directory"),
        ('log.directory="a\\u001bb"', "log.directory"),
        (f"data.corpus={'A' * 300}", "data.corpus"),
        (f"log.directory={'a/' * 3000}", "log.directory"),
        (f"model.config={'A' * 300}", "model.config"),
        ("balance.coefficient=1e300", "balance.coefficient"),
        ("training.clip=1e300", "training.clip"),
        ("optimizer.weight_decay=1e300", "optimizer.weight_decay"),
        ("operators=3", "operators"),
    ],
    ids=lambda value: value[:24],
)
def test_a_value_that_nothing_can_take_is_one_short_fault(override, where):
    fault = faults_of(SOUND, override)[where]
    assert "Undefined" not in str(fault)
    assert str(fault).isprintable()
    assert len(str(fault)) < 500


def test_a_rate_that_float32_still_holds_is_allowed():
    assert Recipe.load(SOUND, ["optimizer.lr=1e38"]).optimizer.lr == 1e38


@pytest.mark.parametrize("name", ["A" * 300, "a\0b", "a/" * 3000, "", "."])
def test_a_name_that_can_be_no_file_is_refused(name):
    assert refused(name).exit_status == 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_table_too_large_to_draw_is_refused_with_the_largest(schedule, pp):
    layout = [f"parallel.schedule={schedule}", f"parallel.pp={pp}", "training.micro_batch_size=1"]
    where = "training.global_batch_size"
    fault = faults_of(SOUND, *layout, f"{where}=200000")[where]
    (nearest,) = map(int, fault.nearest)
    assert Recipe.load(SOUND, [*layout, f"{where}={nearest}"])
    assert where in faults_of(SOUND, *layout, f"{where}={nearest + 1}")


@pytest.mark.parametrize("number", [5, 100_000, 2**31 - 1])
@pytest.mark.parametrize("name", ["list", "interleaved", "auto", "zbv"])
def test_a_number_of_stages_that_cannot_be_is_a_fault(name, number):
    layout = [f"parallel.schedule={name}", f"parallel.num_stages={number}"]
    assert "parallel.num_stages" in faults_of(SOUND, *layout)


def test_more_stages_than_a_table_can_have_are_refused_with_the_most():
    deep = "model.fields.num_hidden_layers=1024"
    (most,) = faults_of(SOUND, deep, "parallel.pp=500")["parallel.pp"].nearest
    assert Recipe.load(SOUND, [deep, f"parallel.pp={most}", "training.global_batch_size=2"])
    many = ["parallel.pp=16", "training.micro_batch_size=1", "training.global_batch_size=256"]
    assert Recipe.load(SOUND, [deep, *many]).table().num_micro_batches == 256


@pytest.mark.parametrize(
    "content",
    [b"[model", b"\xff\xfe", b"a = 1\na = 2\n", b"a=" + b"[" * 3000, b"a=" + b"9" * 5000],
    ids=lambda content: repr(content[:8]),
)
def test_a_file_that_is_no_toml_is_one_clear_line(tmp_path, content):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    error = refused(path)
    assert error.code == "recipe.unreadable"
    assert str(path) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '{"vocab_size": NaN}', "", '{"a":' * 200000, DIGITS],
    ids=lambda content: content[:8],
)
def test_a_model_config_that_is_no_json_object_is_named(tmp_path, content):
    config = tmp_path / "config.json"
    config.write_text(content)
    faults = faults_of(SOUND, f"model.config={config}", "training.steps=0")
    assert str(config) in faults["model.config"].found
    assert "training.steps" in faults


VALUES = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(repr),
    st.sampled_from(["true", "[]", "[1, 2]", "{}", "{a = 1}", "none", "''", "1979-05-27", "[[]]"]),
    st.text(max_size=8),
)
KEYS = st.sampled_from(
    [
        *("model", "model.config", "model.fields", "training", "operators", "name", "data.corpus"),
        *("training.steps", "training.clip", "training.global_batch_size", "optimizer.lr"),
        *("optimizer.betas", "parallel.pp", "parallel.ep", "parallel.cp", "parallel.schedule"),
        *("parallel.layers_per_stage", "model.fields.num_hidden_layers", "model.fields.head_dim"),
        *("model.fields.num_experts", "model.fields.mlp_only_layers", "model.fields.layer_types"),
        *("model.fields.rope_theta", "model.fields.rope_parameters", "model.fields.auto_map"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=4))
def test_no_value_escapes_as_anything_but_a_request_error(tmp_path_factory, pairs):
    overrides = [f"{key}={value}" for key, value in pairs]
    try:
        recipe = Recipe.load(SOUND, overrides)
    except RequestError as error:
        recipe, named = None, error.faults
    if recipe is None:
        assert named
    else:
        assert sum(map(len, recipe.pipeline().split)) == recipe.architecture.num_layers
        path = tmp_path_factory.getbasetemp() / "resolved.toml"
        path.write_text(recipe.to_toml(), encoding="utf-8")
        assert Recipe.load(path) == recipe
