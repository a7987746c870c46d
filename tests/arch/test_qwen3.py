"""Qwen3 as facts: sizes, names, counts and FLOPs against published and hand-derived figures."""

import json
from importlib.resources import files

import pytest

from pith import arch
from pith.arch.parameter import Role
from pith.arch.qwen3 import Qwen3
from pith.errors import RequestError

TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 264,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


def config(name=None, **changes):
    """The fields of a shipped model, or of the tiny one above, with changes."""
    if name is None:
        return TINY | changes
    return json.loads((files("pith") / "recipes" / name / "config.json").read_text()) | changes


def without(key, name=None):
    return {k: v for k, v in config(name).items() if k != key}


def refused(fields):
    with pytest.raises(RequestError) as caught:
        arch.from_config(fields)
    return {fault.where: fault for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("qwen3-0.6b", 0.6e9, 0.6e9),
    ],
)
def test_parameter_counts_are_the_published_ones(name, total, active):
    model = arch.from_config(config(name))
    assert model.num_parameters() == pytest.approx(total, rel=0.01)
    assert model.num_active_parameters() == pytest.approx(active, rel=0.02)


def test_parameter_counts_follow_from_the_sizes():
    model = arch.from_config(config())
    attention = 192 * 192 + 2 * 64 * 192 + 192 * 192 + 2 * 32
    expert = 3 * 192 * 192
    edges = 2 * 264 * 192 + 192
    layer = attention + 2 * 192 + 8 * 192
    assert model.num_parameters() == edges + 4 * (layer + 8 * expert)
    assert model.num_active_parameters() == edges + 4 * (layer + 2 * expert)


@pytest.mark.parametrize(("length", "gigaflops"), [(2048, 20.7), (4096, 23.1), (8192, 27.9)])
def test_flops_per_token_are_the_published_ones(length, gigaflops):
    model = arch.from_config(config("qwen3-30b-a3b"))
    assert round(model.flops_per_token(length) / 1e9, 1) == gigaflops


def test_costs_add_up_to_the_flops():
    model = arch.from_config(config(mlp_only_layers=[1]))
    costs = model.layer_costs(512)
    edges = model.head_cost(512) + model.embedding_cost(512)
    assert sum(costs) + edges == pytest.approx(model.flops_per_token(512), rel=1e-12)
    assert costs[0] == costs[2] == costs[3] != costs[1]
    attention = 6 * (192 * 192 * 2 + 192 * 64 * 2) + 6 * 512 * 6 * 32
    assert costs[1] == attention + 6 * 3 * 192 * 512
    assert costs[0] == attention + 6 * (8 * 192 + 2 * 3 * 192 * 192)


def test_full_attention_counts_twice_the_causal_one():
    model = arch.from_config(config())
    linear = model.flops_per_token(0)
    causal, full = model.flops_per_token(512) - linear, model.flops_per_token(512, causal=False)
    assert full - linear == pytest.approx(2 * causal, rel=1e-12)


def test_every_tensor_has_its_canonical_name_and_shape():
    fields = config(num_hidden_layers=2, mlp_only_layers=[0])
    shapes = {spec.name: spec.shape for spec in arch.from_config(fields).parameters()}
    attention = {
        "input_layernorm": (192,),
        "self_attn.q_proj": (192, 192),
        "self_attn.k_proj": (64, 192),
        "self_attn.v_proj": (64, 192),
        "self_attn.o_proj": (192, 192),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (32,),
        "post_attention_layernorm": (192,),
    }
    expected = {
        "embed_tokens.weight": (264, 192),
        "layers.0.mlp.gate_proj.weight": (512, 192),
        "layers.0.mlp.up_proj.weight": (512, 192),
        "layers.0.mlp.down_proj.weight": (192, 512),
        "layers.1.mlp.gate.weight": (8, 192),
        "layers.1.mlp.experts.gate_proj.weight": (8, 192, 192),
        "layers.1.mlp.experts.up_proj.weight": (8, 192, 192),
        "layers.1.mlp.experts.down_proj.weight": (8, 192, 192),
        "norm.weight": (192,),
        "lm_head.weight": (264, 192),
    }
    for layer in (0, 1):
        expected |= {f"layers.{layer}.{name}.weight": shape for name, shape in attention.items()}
    assert shapes == expected
    assert next(iter(shapes)) == "embed_tokens.weight"
    assert list(shapes)[-2:] == ["norm.weight", "lm_head.weight"]


def test_a_tied_head_is_no_parameter():
    names = [spec.name for spec in arch.from_config(config("qwen3-0.6b")).parameters()]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == 28 * 11 + 2


def test_initial_values_follow_the_role():
    for spec in arch.from_config(config(initializer_range=0.03)).parameters():
        if spec.role is Role.NORM:
            assert (spec.std, spec.fill) == (0.0, 1.0)
            continue
        output = spec.name.endswith(("o_proj.weight", "down_proj.weight"))
        assert spec.std == pytest.approx(0.03 / 8**0.5 if output else 0.03)
        assert spec.fill == 0.0


def test_roles_say_what_a_tensor_is_for():
    roles = {spec.name: spec.role for spec in arch.from_config(config()).parameters()}
    assert roles["embed_tokens.weight"] is Role.EMBEDDING
    assert roles["lm_head.weight"] is Role.HEAD
    assert roles["layers.0.mlp.gate.weight"] is Role.ROUTER
    assert roles["layers.3.mlp.experts.up_proj.weight"] is Role.EXPERTS
    assert roles["layers.2.self_attn.q_proj.weight"] is Role.MATRIX
    assert roles["layers.2.self_attn.q_norm.weight"] is Role.NORM


def test_hugging_face_names_are_per_expert():
    model = arch.from_config(config(num_hidden_layers=1, num_experts=2))
    assert model.hf_name("layers.0.mlp.experts.up_proj.weight") == (
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.1.up_proj.weight",
    )
    assert model.hf_name("layers.0.mlp.gate.weight") == ("model.layers.0.mlp.gate.weight",)
    assert model.hf_name("embed_tokens.weight") == ("model.embed_tokens.weight",)
    assert model.hf_name("lm_head.weight") == ("lm_head.weight",)
    names = [name for spec in model.parameters() for name in model.hf_name(spec.name)]
    assert len(names) == len(set(names)) == 3 + 8 + 1 + 3 * 2


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, []),
    ],
)
def test_which_layers_have_experts(changes, sparse):
    model = arch.from_config(config(**changes))
    assert [layer for layer in range(4) if model.is_moe(layer)] == sparse


def test_a_dense_model_has_no_experts():
    model = arch.from_config(config("qwen3-0.6b"))
    assert model.num_experts == 0
    assert not any(map(model.is_moe, range(28)))


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "intermediate_size", "moe_intermediate_size", "num_experts"),
        *("num_experts_per_tok", "norm_topk_prob", "rms_norm_eps", "rope_theta"),
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(key):
    assert refused(without(key))[key].found == "nothing"


def test_a_dense_config_must_say_its_head_dim():
    assert "head_dim" in refused(without("head_dim", "qwen3-0.6b"))
    assert arch.from_config(without("head_dim")).head_dim == 192 // 6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("vocab_size", value) for value in ("264", 264.0, True, 0, -1, None, [264], 2**31)],
        *[("rms_norm_eps", value) for value in ("1e-6", 0, -1e-6, float("nan"), float("inf"))],
        *[("norm_topk_prob", value) for value in (1, "true", None)],
        *[("mlp_only_layers", value) for value in ([4], [-1], [0.0], [True], "0", 1)],
        ("num_hidden_layers", 10**400),
        ("rope_theta", 10**400),
        ("head_dim", 31),
        ("num_key_value_heads", 4),
        ("num_experts_per_tok", 9),
    ],
)
def test_a_wrong_value_is_named(key, value):
    assert set(refused(config(**{key: value}))) == {key}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(key, value):
    assert key in refused(config(**{key: value}))


def test_a_sliding_window_that_is_switched_off_is_none():
    assert arch.from_config(config(use_sliding_window=False, sliding_window=4096))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "foo", 3])
def test_rope_scaling_is_refused_by_name_in_every_spelling(key, spelling, kind):
    fault = refused(config(**{key: {spelling: kind, "factor": 8.0}}))[key]
    assert str(kind) in fault.wanted


@pytest.mark.parametrize("table", [{"factor": 8.0}, [8.0], "yarn", {"partial_rotary_factor": 0.5}])
def test_rope_scaling_without_a_type_is_refused(table):
    assert "rope_scaling" in refused(config(rope_scaling=table))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
    ],
)
def test_default_rope_is_read_in_every_spelling(changes):
    assert arch.from_config(config(**changes)).rope_theta == 10000.0


@pytest.mark.parametrize("theta", [500.0, "1e4", -1])
def test_two_different_rope_bases_are_refused(theta):
    tables = config(rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert "rope_theta" in refused(tables)


def test_all_faults_of_a_config_come_together():
    faults = refused({"model_type": "qwen3_moe", "hidden_act": "relu", "vocab_size": "many"})
    assert {"vocab_size", "hidden_act", "hidden_size", "num_experts", "rope_theta"} <= set(faults)


@pytest.mark.parametrize("model_type", ["mamba", None, 3, "qwen3_vl"])
def test_an_unknown_family_lists_the_supported(model_type):
    fields = {"model_type": model_type, "text_config": config()}
    fault = refused(fields)["model_type"]
    assert fault.nearest == arch.SUPPORTED
    assert set(arch.SUPPORTED) >= {"qwen3_moe", "qwen3"}


def test_unknown_keys_are_collected_and_never_used():
    fields = config(auto_map={"AutoModel": "evil.Model"}, fancy=1, bos_token_id=0)
    model = arch.from_config(fields)
    assert model.ignored == ("auto_map", "fancy")
    assert arch.from_config(config()).ignored == ()


def test_the_other_spelling_of_the_expert_count_is_read():
    fields = without("num_experts") | {"num_local_experts": 8}
    assert arch.from_config(fields) == arch.from_config(config())


def test_the_family_file_refuses_as_the_room_does():
    with pytest.raises(RequestError, match="fault"):
        Qwen3.from_config(config(vocab_size=0))
