"""A config scaled down is tiny and of the same structure, for families that pith knows or not."""

import json
from importlib.resources import files
from math import inf, pi

import pytest

from pith import arch
from pith.arch.scale import scale_down
from pith.config import Recipe, shipped
from pith.config.scaled import scaled_down

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rope_theta": 1e6,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
OLMOE = MIXTRAL | {
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def moe_layers(config):
    model = arch.from_config(config)
    return [model.is_moe(layer) for layer in range(model.num_layers)]


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_scaled_down_is_valid_tiny_and_keeps_all_but_size(name):
    recipe = Recipe.load(name)
    small = scaled_down(recipe)
    assert Recipe.parse(small.to_toml()) == small
    before, after = recipe.architecture, small.architecture
    assert after.num_parameters() < 600_000
    assert after.num_heads // after.num_kv_heads == before.num_heads // before.num_kv_heads
    assert after.vocab_size == 264
    assert (after.num_experts > after.top_k > 1) if before.num_experts else not after.num_experts
    kept = ("tie_word_embeddings", "norm_topk_prob", "model_type", "rope_theta", "rms_norm_eps")
    assert all(getattr(after, key) == getattr(before, key) for key in kept)
    assert small.parallel == recipe.parallel
    assert small.balance == recipe.balance
    training = {"precision", "clip", "deterministic", "non_finite", "recompute"}
    assert small.training.model_dump(include=training) == recipe.training.model_dump(
        include=training
    )
    seeds = [recipe.training.seed, recipe.data.seed]
    assert [small.training.seed, small.data.seed] == [seed or 1 for seed in seeds]
    rate = {"warmup_steps", "decay_steps"}
    assert small.optimizer.model_dump(exclude=rate) == recipe.optimizer.model_dump(exclude=rate)
    for key in rate:
        assert bool(getattr(small.optimizer, key)) == bool(getattr(recipe.optimizer, key))
    assert small.batch().num_micro_batches >= min(4, recipe.batch().num_micro_batches)
    assert small.training.sequence_length == 32
    assert small.data.corpus == "embedded"
    assert all(len(layers) for layers in small.pipeline().split[1:-1])


def test_a_recipe_for_many_ranks_keeps_them_with_as_many_experts_and_layers():
    wide = ["parallel.ep=16", "parallel.pp=4", "parallel.layers_per_stage=" + str([12] * 4)]
    wide += ["parallel.schedule=1f1b", "training.global_batch_size=256", "training.clip=none"]
    small = scaled_down(Recipe.load("qwen3-30b-a3b", wide, world_size=128), world_size=128)
    assert small.parallel.num_stages == 4
    assert small.architecture.num_experts == 16
    assert small.batch(128).num_micro_batches == 8
    assert small.batch(128).data_ranks == 32
    assert small.training.clip is None
    deep = scaled_down(Recipe.load("qwen3-235b-a22b"))
    assert deep.architecture.num_layers == 16  # two stages on each of eight ranks
    assert deep.optimizer.warmup_steps == 1
    assert deep.optimizer.decay_steps == 4


@pytest.mark.parametrize("config", [MIXTRAL, OLMOE], ids=["mixtral", "olmoe"])
def test_a_family_without_head_dim_keeps_ratio_of_heads_and_whole_even_heads(config):
    small = scale_down(config)
    assert small.keys() == config.keys()
    heads, kv_heads = small["num_attention_heads"], small["num_key_value_heads"]
    assert heads / kv_heads == config["num_attention_heads"] / config["num_key_value_heads"]
    assert small["hidden_size"] % (2 * heads) == 0
    assert small["hidden_size"] <= 64
    assert small["num_local_experts"] == 8
    assert small.get("num_experts", 8) == 8
    assert small["num_experts_per_tok"] == 2
    assert small["num_hidden_layers"] == 4
    assert small["vocab_size"] == 264
    assert small["eos_token_id"] < 264
    assert small["sliding_window"] is None
    assert small["model_type"] == config["model_type"]
    assert small["initializer_range"] == 0.1


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [True] * 4),
        ({"mlp_only_layers": [0]}, [False, True, True, True]),
        ({"mlp_only_layers": [47]}, [True, True, True, False]),
        ({"mlp_only_layers": list(range(24))}, [False, False, True, True]),
        ({"mlp_only_layers": [20]}, [True, True, True, False]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 3}, [False, False, True] * 2),
        ({"decoder_sparse_step": 24}, [False, False, False, True]),
        ({"mlp_only_layers": [1], "num_hidden_layers": 3}, [True, False, True]),
    ],
    ids=str,
)
def test_dense_and_moe_layers_both_stay_in_their_pattern(changes, wanted):
    assert moe_layers(scale_down(QWEN3 | changes)) == wanted


def test_kinds_of_layers_are_cut_to_the_same_length_and_none_is_lost():
    gemma = QWEN3 | {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8}
    small = scale_down(gemma)
    assert len(small["layer_types"]) == small["num_hidden_layers"] == 4
    assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
    next_ = [*["linear_attention"] * 3, "full_attention"]
    small = scale_down(QWEN3 | {"full_attention_interval": 4, "layer_types": next_ * 12})
    assert small["layer_types"] == next_
    assert small["full_attention_interval"] == 4
    deepseek = {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
    small = scale_down(QWEN3 | deepseek | {"num_hidden_layers": 61})
    assert small["n_routed_experts"] % small["n_group"] == 0
    assert 1 < small["topk_group"] < small["n_group"]
    assert 0 < small["first_k_dense_replace"] < small["num_hidden_layers"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
# Turns within the original context below which a pair is scaled, and above which it is not.
BANDS = {
    "llama3": [(0, 1), (1, 4), (4, inf)],
    "yarn": [(0, 1), (1, 32), (32, inf)],
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def wavelengths(small):
    """Positions a full turn of each pair of channels takes."""
    width = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
    return [2 * pi * small["rope_theta"] ** (2 * n / width) for n in range(width // 2)]


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3], ids=["head derived", "head given"])
def test_scaled_rope_keeps_fast_middle_and_slow_channels(config):
    small = scale_down(config | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert small["rope_scaling"] == LLAMA3
    turns = [8192 / length for length in wavelengths(small)]
    assert [sum(few <= turn < more for turn in turns) for few, more in BANDS["llama3"]] == [3, 1, 4]
    small = scale_down(config | {"rope_scaling": YARN})
    assert small["rope_scaling"] == YARN
    turns = [32768 / length for length in wavelengths(small)]
    assert [sum(few <= turn < more for turn in turns) for few, more in BANDS["yarn"]] == [3, 2, 3]
    plain = config | {"rope_scaling": {"rope_type": "default"}}
    assert len(wavelengths(scale_down(plain))) == len(wavelengths(scale_down(config))) <= 4


def test_scaled_rope_of_some_layers_or_of_a_part_of_the_head_counts_too():
    tables = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    assert scale_down(QWEN3 | {"rope_parameters": tables})["head_dim"] == 16
    assert (
        scale_down(QWEN3 | {"rope_scaling": YARN, "qk_rope_head_dim": 64})["qk_rope_head_dim"] == 16
    )


def test_a_factor_for_each_pair_of_channels_is_left_in_scaled_rope():
    factors = {"short_factor": list(range(64)), "long_factor": list(range(64, 128))}
    long = {"type": "longrope", "original_max_position_embeddings": 4096} | factors
    for config in (MIXTRAL, QWEN3):
        table = scale_down(config | {"rope_scaling": long})["rope_scaling"]
        assert [table["short_factor"][n] for n in (0, -1)] == [0, 63]
        assert len(table["short_factor"]) == len(table["long_factor"]) == 8
        assert table["original_max_position_embeddings"] == 4096
    assert long["short_factor"] == list(range(64))


def test_what_is_small_already_stays():
    config = json.loads((files("pith") / "recipes/tiny-moe/config.json").read_text())
    small = scale_down(config)
    assert scale_down(small) == small
    less = small | {"vocab_size": 40, "hidden_size": 8, "num_experts": 3, "num_hidden_layers": 1}
    assert scale_down(less) == less
    assert scale_down(QWEN3 | {"num_experts": 6})["num_experts"] == 6
    assert scale_down(QWEN3 | {"num_experts": 60}, expert_ranks=3)["num_experts"] == 6


def test_values_of_a_wrong_type_are_left_for_the_reader_to_refuse():
    wrong = QWEN3 | {
        "num_experts": "many",
        "num_hidden_layers": True,
        "mlp_only_layers": 3,
        "hidden_size": -1,
        "vocab_size": None,
        "initializer_range": "wide",
    }
    small = scale_down(wrong)
    refused = {fault.where for fault in arch.examine(small)[1]}
    assert refused == {
        *("num_experts", "num_hidden_layers", "hidden_size", "vocab_size", "initializer_range"),
        "mlp_only_layers",
    }
