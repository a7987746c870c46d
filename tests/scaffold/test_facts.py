"""How a config is read: by its own spellings, and only where plain parts do what it asks."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from pith.arch.decoder import Decoder
from pith.arch.fields import FieldReader
from pith.config import Recipe
from pith.scaffold.facts import assumptions, scaled_rope
from pith.scaffold.family import Family, start_of
from pith.scaffold.given import Given
from pith.scaffold.layout import Layout, layout_of
from pith.scaffold.texts import facts_text, recipe_text, stage_text

DENSE = {
    "model_type": "fresh",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 8192,
}
MOE = DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2}


def family(config: dict[str, Any], *, like: str | None = None) -> Family:
    given = Given(config, json.dumps(config).encode())
    return Family("fresh", given, start_of(config, like=like))


def facts(config: dict[str, Any], *, like: str | None = None) -> str:
    """The text of the facts, which is Python."""
    text = facts_text(family(config, like=like))
    ast.parse(text)
    return text


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("hidden_act", "silu", 'fields.only("hidden_act", ("silu",))'),
        ("attention_bias", False, 'fields.only("attention_bias", (False,))'),
        ("attention_dropout", 0.0, 'fields.only("attention_dropout", (0,))'),
        ("sliding_window", None, 'fields.only("sliding_window", (None,))'),
        ("mlp_only_layers", [], 'fields.only("mlp_only_layers", ([],))'),
        ("use_qk_norm", False, 'fields.only("use_qk_norm", (False,))'),
        ("use_qk_norm", True, 'fields.only("use_qk_norm", (True,))'),
    ],
)
def test_a_variant_that_is_plain_is_read_and_its_other_values_refused(
    key: str, value: Any, line: str
) -> None:
    assert f"        {line}\n" in facts(MOE | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("sliding_window", 4096),
        ("mlp_only_layers", [0]),
        ("scoring_func", "sigmoid"),
        ("attention_multiplier", 0.5),
        ("clip_qkv", None),
    ],
)
def test_what_no_plain_part_understands_stays_unread(key: str, value: Any) -> None:
    assert key not in facts(MOE | {key: value})


def test_a_window_that_is_switched_off_is_none() -> None:
    text = facts(DENSE | {"use_sliding_window": False, "sliding_window": 4096})
    assert 'fields.only("use_sliding_window", (False,))' in text
    assert 'fields.get("sliding_window")' in text


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("width", ["moe_intermediate_size", "intermediate_size"])
def test_experts_are_read_in_every_spelling(count: str, width: str) -> None:
    text = facts(DENSE | {count: 8, "num_experts_per_tok": 2, width: 512})
    assert f'**read_experts(fields, width="{width}")' in text
    assert '*tensors.experts("mlp")' in text


def test_a_dense_family_has_no_experts() -> None:
    text = facts(DENSE)
    assert "experts" not in text.replace("has experts", "")
    assert '*tensors.swiglu("mlp", self.intermediate_size)' in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "read_rope_base(fields)"),
        ({"rope_scaling": None}, "read_rope_base(fields)"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "read_rope_base(fields)",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "read_rope_base(fields, leaves_scaling=True)",
        ),
        ({"rope_theta": None}, 'fields.number("rope_theta", default=10000.0)'),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            "read_rope_base(fields, leaves_scaling=True)",
        ),
    ],
)
def test_rope_is_read_by_its_reader_and_scaling_stays_unread(
    changes: dict[str, Any], line: str
) -> None:
    config = DENSE | changes
    assert f"rope_theta={line}" in facts(config)
    arch, faults = examined(config)
    assert faults == []
    assert arch.rope_theta == (5e5 if "rope_parameters" in changes else 1e4)
    scaled = {"rope_scaling", "rope_parameters"} & changes.keys() if "leaves" in line else set()
    assert set(arch.ignored) == scaled == set(scaled_rope(config))


def test_scaled_rope_goes_by_its_type() -> None:
    assert scaled_rope({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}) == {
        "rope_scaling": "llama3 with factor"
    }


def examined(config: dict[str, Any], *, like: str | None = None, more: str = "") -> Any:
    """What the facts make of a config, and their faults; `more` is code in their class."""
    module: dict[str, Any] = {"__name__": "fresh"}
    exec(facts(config, like=like) + more, module)
    fields = FieldReader(config)
    return module["Fresh"].examine(fields), fields.faults


@pytest.mark.parametrize("like", [None, "qwen3"])
def test_what_a_family_overrides_may_call_what_it_overrides(like: str | None) -> None:
    given = {"layer": "0", "batch_size": "2", "length": "3", "sequence_length": "4"}
    given |= {"name": "'norm.weight'", "spec": "self.parameters()[0]", "causal": "causal=True"}
    names = [n for n in vars(Decoder) if not n.startswith("_") and callable(getattr(Decoder, n))]
    left = ("from_config", "examine", *(["layer_parameters"] if like is None else []))
    methods = [name for name in names if name not in left]
    assert {"hf_name", "layer_costs", "is_moe", "parameters"} <= set(methods)
    more = ""
    for name in methods:
        more += f"\n    def {name}(self, *args, **kwargs):\n"
        more += f"        return super().{name}(*args, **kwargs)\n"
    arch, _ = examined(MOE, like=like, more=more)
    plain, _ = examined(MOE, like=like)
    for name in methods:
        words = [given[p] for p in inspect.signature(getattr(plain, name)).parameters]
        call = f"self.{name}({', '.join(words)})"
        assert eval(call, {"self": arch}) == eval(call, {"self": plain})


def test_what_the_config_leaves_open_is_told() -> None:
    assert len(list(assumptions(MOE))) == 1
    assert 'fields.flag("norm_topk_prob", default=True)' in facts(MOE)
    said = MOE | {"norm_topk_prob": False}
    assert list(assumptions(said)) == []
    assert 'fields.flag("norm_topk_prob")' in facts(said)
    assert len(list(assumptions(DENSE | {"rope_theta": None}))) == 1


def test_norms_of_heads_that_the_config_names_begin_with_the_family_that_has_them() -> None:
    normed = DENSE | {"use_qk_norm": True}
    start = family(normed).start
    assert (start.family, start.arch, start.stage) == ("qwen3", "Qwen3", "Qwen3Stage")
    assert "use_qk_norm" in start.why
    assert "class Fresh(Qwen3):" in facts(normed)
    assert "layer_parameters" not in facts(normed)
    assert "class FreshStage(Qwen3Stage):" in stage_text(family(normed))
    assert "class Fresh(Decoder):" in facts(normed, like="plain")
    assert "class Fresh(Qwen3):" in facts(DENSE, like="qwen3")
    assert "class FreshStage(DecoderStage[Fresh]):" in stage_text(family(DENSE))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DENSE | {"num_hidden_layers": 4, "hidden_size": 1024}, Layout(1, 1)),
        (DENSE, Layout(4, 1)),  # 7.2 B parameters of 18 bytes: 130 GB
        (MOE, Layout(2, 8)),  # 46.7 B: 840 GB
        (DENSE | {"num_hidden_layers": "many"}, Layout(1, 1)),
    ],
)
def test_a_recipe_takes_the_smallest_layout_that_holds_the_model(
    config: dict[str, Any], layout: Layout
) -> None:
    assert layout_of(config) == layout
    assert layout.schedule == ("dualpipev" if layout.pp > 1 else "1f1b")


@pytest.mark.parametrize("longest", [256, 8192, None, "long"])
def test_a_recipe_is_whole(tmp_path: Any, longest: Any) -> None:
    config = DENSE | {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": longest}
    (tmp_path / "recipe.toml").write_text(recipe_text(family(config)))
    sound = config | {"max_position_embeddings": longest if type(longest) is int else 8192}
    (tmp_path / "config.json").write_text(json.dumps(sound))
    recipe = Recipe.load(str(tmp_path))
    assert recipe.training.sequence_length == (256 if longest == 256 else 4096)
    assert recipe.parallel.pp == 4


@pytest.mark.parametrize(("value", "wanted"), [(0.02, 0.02), (0, 0.0), (None, 0.001)])
def test_a_recipe_balances_experts_as_its_config_says(
    tmp_path: Path, value: float | None, wanted: float
) -> None:
    config = MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 128}
    config |= {"moe_intermediate_size": 512, "router_aux_loss_coef": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "recipe.toml").write_text(recipe_text(family(config)))
    assert Recipe.load(str(tmp_path)).balance.coefficient == wanted
    assert "[balance]" not in recipe_text(family(DENSE | {"router_aux_loss_coef": value}))
