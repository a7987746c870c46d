"""How the facts of a family are read from a config like the given one.

Each key that the plain parts understand is read under the spelling of this config, and its other
values are refused by name. A key with a value that they do not understand stays unread.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pith.arch.experts import COUNTS
from pith.arch.fields import FieldReader
from pith.arch.rope import rope_kind
from pith.arch.scale import ROPE_TABLES
from pith.scaffold.family import NORM_KEYS, NORMED_HEADS, Family

# Keys of variants, with the values at which a plain decoder is what they ask for.
VARIANTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0,),
        "qkv_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1,),
        "use_sliding_window": (False,),
        "sliding_window": (None,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "moe_layer_freq": (1,),
        "first_k_dense_replace": (0,),
        "n_shared_experts": (0,),
        "n_group": (1,),
        "topk_group": (1,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
        "routed_scaling_factor": (1,),
        "router_jitter_noise": (0,),
        "pretraining_tp": (1,),
    }
)
ROPE_BASE = 10000.0  # where a config leaves it out
BALANCE = "router_aux_loss_coef"
EXPERT_WIDTH, DENSE_WIDTH = "moe_intermediate_size", "intermediate_size"


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the config counts experts."""
    return any(config.get(key) for key in COUNTS)


def expert_width(config: Mapping[str, Any]) -> str:
    """The key under which the width of an expert stands."""
    return DENSE_WIDTH if config.get(EXPERT_WIDTH) is None else EXPERT_WIDTH


def refusals(family: Family) -> Iterator[str]:
    """The lines that refuse by name what the family's layers do not implement."""
    config, reader = family.given.fields, FieldReader(family.given.fields)
    for key, allowed in _variants(family).items():
        if key not in config:
            continue
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            yield 'fields.get("sliding_window")  # only read by models that switch it on'
            continue
        reader.only(key, allowed)
        if reader.holds(key):
            choices = ", ".join(map(_literal, allowed))
            yield f'fields.only("{key}", ({choices},))'


def sizes(config: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of the family's class after the model type, one a line."""
    width = expert_width(config) if has_experts(config) else DENSE_WIDTH
    dense = DENSE_WIDTH if config.get(DENSE_WIDTH) is not None else width
    yield 'vocab_size=fields.size("vocab_size")'
    yield 'hidden_size=fields.size("hidden_size")'
    yield 'num_layers=fields.size("num_hidden_layers", maximum=MAX_LAYERS)'
    yield "**read_heads(fields, may_derive_width=True)"
    yield f'intermediate_size=fields.size("{dense}")'
    if has_experts(config):
        yield f'**read_experts(fields, width="{width}")'
        default = ", default=True" if config.get("norm_topk_prob") is None else ""
        yield f'norm_topk_prob=fields.flag("norm_topk_prob"{default})'
    yield 'rms_norm_eps=fields.number("rms_norm_eps")'
    yield f"rope_theta={_rope(config)}"
    yield 'tie_word_embeddings=fields.flag("tie_word_embeddings", default=False)'
    yield 'initializer_range=fields.number("initializer_range", default=0.02)'
    yield 'max_position_embeddings=fields.size("max_position_embeddings")'


def assumptions(config: Mapping[str, Any]) -> Iterator[str]:
    """What the config leaves open, and what is taken for it."""
    if has_experts(config) and config.get("norm_topk_prob") is None:
        yield "norm_topk_prob is not in the config; weights of the top k are made to sum to 1"
    if not has_rope_base(config):
        yield f"no rope base is in the config; {ROPE_BASE:g} is taken"


def _variants(family: Family) -> dict[str, tuple[Any, ...]]:
    normed = family.start.family == NORMED_HEADS
    return dict(VARIANTS) | dict.fromkeys(NORM_KEYS, (normed,))


def has_rope_base(config: Mapping[str, Any]) -> bool:
    """Whether the config says what its rope base is, sound or not."""
    tables = (config, *(config.get(key) for key in ROPE_TABLES))
    bases = [table.get("rope_theta") for table in tables if isinstance(table, Mapping)]
    return any(base is not None for base in bases)


def scaled_rope(config: Mapping[str, Any]) -> dict[str, str]:
    """The rope tables that plain parts do not understand: key -> its type, and what is with it."""
    tables = {key: config[key] for key in ROPE_TABLES if config.get(key) is not None}
    kinds = {key: rope_kind(table) for key, table in tables.items()}
    return {key: kind for key, kind in kinds.items() if kind != "default"}


def read_balance(fields: FieldReader) -> float | None:
    """The weight of the load-balance loss in training; None where the config leaves it open."""
    value = fields.get(BALANCE)
    if value is None:
        return None
    is_off = type(value) in (int, float) and value == 0
    return 0.0 if is_off else fields.number(BALANCE)


def _rope(config: Mapping[str, Any]) -> str:
    if not has_rope_base(config):
        return f'fields.number("rope_theta", default={ROPE_BASE!r})'
    return f"read_rope_base(fields{', leaves_scaling=True' if scaled_rope(config) else ''})"


def _literal(value: Any) -> str:
    """The value as Python source in the quotes of the house."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
