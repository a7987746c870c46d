"""A model config of the same structure that trains within seconds on a laptop.

Works on the keys of a Hugging Face config.json whatever the family, known to pith or not: sizes
are capped by one table, relations between them are kept, and every other key stays as it is.
"""

from collections.abc import Mapping, Sequence
from math import lcm
from types import MappingProxyType
from typing import Any, TypeGuard

# Widths differ from each other, so that a swapped pair of axes cannot go unseen.
CAPS: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 264,  # bytes, special tokens, and a multiple of eight
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": 16,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Every so many layers one is of another kind.
INTERVALS = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "full_attention_interval",
    "sliding_window_pattern",
)
LAYER_NUMBERS = ("mlp_only_layers",)
LAYER_KINDS = ("layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

MOST_KV_HEADS = 2
MOST_EXPERTS = 8
MOST_INTERVAL = 4
HIDDEN_SIZE = 32
LEAST_HEAD_DIM = 4  # where it is not given: hidden_size over the heads
# With scaled rope: enough pairs of channels that fast, middle and slow ones are among them.
ROPE_TABLES = ("rope_scaling", "rope_parameters")
ROPE_WIDTHS = ("head_dim", "qk_rope_head_dim")
SCALED_ROPE_WIDTH = 16
FACTORS = ("short_factor", "long_factor")  # of such a table: one for each pair of channels
LAYERS = 4
MOST_LAYERS = 6
# So large that no gradient drowns in the rounding of float32.
INITIALIZER_RANGE = 0.1


def scale_down(
    config: Mapping[str, Any], *, least_layers: int = LAYERS, expert_ranks: int = 1
) -> dict[str, Any]:
    """The fields of a tiny model of the same family, kinds of layers and flags as `config`.

    Kept are the ratio of query to key heads, which kinds of layers there are and in what rhythm,
    tied weights, and more than one expert a token where there was. Rope that scales some
    frequencies otherwise than others keeps its constants, and heads wide enough for all of them.
    Nothing becomes larger than it
    was, but for `initializer_range`. There are at least `least_layers` layers and a multiple of
    `expert_ranks` experts, as far as `config` has so many. Values of a wrong type are left for
    the reader of the config to refuse.
    """
    small = dict(config)
    caps = dict(CAPS) | dict.fromkeys(INTERVALS, MOST_INTERVAL)
    if _has_scaled_rope(config):
        caps |= dict.fromkeys(ROPE_WIDTHS, SCALED_ROPE_WIDTH)
    for key, most in caps.items():
        if _is_count(small.get(key)):
            small[key] = min(small[key], most)
    small |= _experts(config, expert_ranks)
    small |= _heads(config)
    small |= _rope_factors(config, small)
    small |= _layers(config, _num_layers(small, least_layers))
    small |= _token_ids(small)
    small["initializer_range"] = _wider(config.get("initializer_range"))
    return small


def _experts(config: Mapping[str, Any], ranks: int) -> dict[str, int]:
    most = max(MOST_EXPERTS // ranks, 1) * ranks
    return {key: min(config[key], most) for key in EXPERTS if _is_count(config.get(key))}


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Fewer heads in the same ratio, and a hidden size that is a multiple of them."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not (_is_count(hidden) and _is_count(heads)):
        return {}
    kv_heads = config.get("num_key_value_heads", heads)
    if not _is_count(kv_heads) or heads % kv_heads:
        return {}
    few = max(n for n in range(1, MOST_KV_HEADS + 1) if kv_heads % n == 0)
    small = {"num_attention_heads": heads // kv_heads * few}
    if "num_key_value_heads" in config:
        small["num_key_value_heads"] = few
    least = SCALED_ROPE_WIDTH if _has_scaled_rope(config) else LEAST_HEAD_DIM
    head_dim = 1 if _is_count(config.get("head_dim")) else least
    unit = small["num_attention_heads"] * head_dim
    small["hidden_size"] = min(hidden, -(-HIDDEN_SIZE // unit) * unit)
    return small


def _has_scaled_rope(config: Mapping[str, Any]) -> bool:
    """Whether a rope table, or one inside it for some layers, is of another type than default."""
    tables = [table for key in ROPE_TABLES if isinstance(table := config.get(key), Mapping)]
    inner = [value for table in tables for value in table.values() if isinstance(value, Mapping)]
    kinds = [table.get(key) for table in (*tables, *inner) for key in ("type", "rope_type")]
    return any(kind not in (None, "default") for kind in kinds)


def _rope_factors(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Rope tables with a list of factors cut to the pairs of a head that are left, from all over
    the list."""
    before, after = _head_dim(config), _head_dim(small)
    cut = {}
    for key in ROPE_TABLES:
        if isinstance(table := config.get(key), Mapping) and before > after:
            lists = {name: table[name] for name in FACTORS if isinstance(table.get(name), list)}
            cut[key] = dict(table) | {
                name: _all_over(factors, len(factors) * after // before)
                for name, factors in lists.items()
                if factors
            }
    return cut


def _head_dim(config: Mapping[str, Any]) -> int:
    """The width of a head, given or derived; 0 where neither can be."""
    given, hidden = config.get("head_dim"), config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if _is_count(given):
        return given
    return hidden // heads if _is_count(hidden) and _is_count(heads) else 0


def _num_layers(small: Mapping[str, Any], least: int) -> int:
    """Enough layers for whole periods of every rhythm, where that is not too many."""
    given = [small[key] for key in INTERVALS if _is_count(small.get(key))]
    whole = lcm(*given)
    period = whole if whole <= max(MOST_LAYERS, least) else max(given)
    return -(-max(LAYERS, least) // period) * period


def _layers(config: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The number of layers, and each list that tells of single ones cut to it."""
    num_layers = config.get("num_hidden_layers")
    if not _is_count(num_layers) or num_layers <= most:
        return {}
    small: dict[str, Any] = {"num_hidden_layers": most}
    if _is_count(config.get("max_window_layers")):
        small["max_window_layers"] = min(config["max_window_layers"], most)
    for key in LAYER_NUMBERS:
        numbers = config.get(key)
        if isinstance(numbers, list | tuple):
            marked = [layer in numbers for layer in range(num_layers)]
            small[key] = [layer for layer, is_in in enumerate(_cut(marked, most)) if is_in]
    for key in LAYER_KINDS:
        kinds = config.get(key)
        if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
            small[key] = _cut(kinds, most)
    return small


def _cut(kinds: Sequence[Any], most: int) -> list[Any]:
    """`most` of these layers, with every kind among them: the first ones, or some from all over
    the model, or the first ones with what they lack at the end."""
    first = list(kinds[:most])
    for some in (first, _all_over(kinds, most)):
        if all(kind in some for kind in kinds):
            return some
    lacking: list[Any] = []
    for kind in kinds:
        if kind not in first and kind not in lacking:
            lacking.append(kind)
    return [*first[: max(most - len(lacking), 0)], *lacking][:most]


def _all_over(values: Sequence[Any], most: int) -> list[Any]:
    """`most` of these values, spread evenly from the first to the last."""
    last = len(values) - 1
    return [values[round(n * last / max(most - 1, 1))] for n in range(most)]


def _token_ids(small: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens that the vocabulary still has: one beyond it becomes its last."""
    size = small.get("vocab_size")
    if not _is_count(size):
        return {}

    def inside(value: Any) -> Any:
        if isinstance(value, list):
            return [inside(each) for each in value]
        return min(value, size - 1) if _is_count(value) else value

    return {key: inside(small[key]) for key in TOKEN_IDS if key in small}


def _wider(spread: Any) -> Any:
    if spread is None:
        return INITIALIZER_RANGE
    is_number = isinstance(spread, int | float) and not isinstance(spread, bool)
    return max(spread, INITIALIZER_RANGE) if is_number else spread


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
