"""A first layout for a recipe: the fewest GPUs that surely hold weights and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pith.arch.experts import COUNTS
from pith.scaffold.facts import DENSE_WIDTH, expert_width, has_experts

# Weights in bfloat16, masters, gradients and two moments in float32.
BYTES_PER_PARAMETER = 2 + 4 + 4 + 8
ROOM_BYTES = 60e9  # of a GPU of 80 GB; the rest is for activations
STEPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks per axis."""

    pp: int
    ep: int

    @property
    def schedule(self) -> str:
        return "dualpipev" if self.pp > 1 else "1f1b"


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The fewest ranks that hold the model; experts are spread before layers.

    What is not an expert is sharded over the ranks of ep too, so that each holds an equal share.
    """
    num_layers, num_experts = _size(config, "num_hidden_layers"), _num_experts(config)
    choices = [
        Layout(pp, ep)
        for ep in STEPS
        for pp in STEPS
        if (ep == 1 or (num_experts and num_experts % ep == 0))
        and (pp == 1 or 2 * pp <= num_layers)
    ]
    by_size = sorted(choices, key=lambda layout: (layout.pp * layout.ep, layout.pp))
    num_bytes = BYTES_PER_PARAMETER * _count(config)
    fitting = (each for each in by_size if num_bytes / (each.pp * each.ep) <= ROOM_BYTES)
    return next(fitting, by_size[-1])


def _count(config: Mapping[str, Any]) -> int:
    """The parameters of a plain decoder, norms and router left out."""
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim") or hidden // max(heads, 1)
    kv_heads = _size(config, "num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    width = expert_width(config) if has_experts(config) else DENSE_WIDTH
    mlps = max(_num_experts(config), 1) * 3 * hidden * _size(config, width)
    return 2 * hidden * _size(config, "vocab_size") + layers * (attention + mlps)


def _num_experts(config: Mapping[str, Any]) -> int:
    return next((size for key in COUNTS if (size := _size(config, key))), 0)


def _size(config: Mapping[str, Any], key: str) -> int:
    """The whole number under `key`; 0 for what is no size, which the family's facts refuse."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0
