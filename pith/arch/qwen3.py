"""Qwen3: grouped-query attention with q and k norms, dense or MoE layers.

Everything about the family that can be known without tensors (model types qwen3 and qwen3_moe).
"""

from dataclasses import dataclass
from typing import Any, Self

from pith.arch.attention import read_heads
from pith.arch.decoder import MAX_LAYERS, Decoder, LayerTensors
from pith.arch.experts import read_experts
from pith.arch.fields import FieldReader
from pith.arch.parameter import ParameterSpec
from pith.arch.rope import read_rope_base

MODEL_TYPES = ("qwen3_moe", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Qwen3(Decoder):
    """The sizes of one model, and which of its layers are dense."""

    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def examine(cls, fields: FieldReader) -> Self:
        """Read all fields; what is wrong lands in `fields.faults` and gets a stand-in value."""
        mlp = _read_mlp(fields)
        _refuse_variants(fields)
        is_moe = mlp["model_type"] == "qwen3_moe"  # whose configs may leave head_dim out
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            num_layers=fields.size("num_hidden_layers", maximum=MAX_LAYERS),
            **read_heads(fields, may_derive_width=is_moe),
            intermediate_size=fields.size("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=read_rope_base(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            initializer_range=fields.number("initializer_range", default=0.02),
            max_position_embeddings=fields.size("max_position_embeddings"),
            **mlp,
            ignored=fields.unknown(),
        )

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one dense MLP."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def layer_parameters(self, layer: int) -> tuple[ParameterSpec, ...]:
        """The tensors of one layer."""
        tensors, hidden = LayerTensors(self, layer), self.hidden_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        dense = tensors.swiglu("mlp", self.intermediate_size)
        return (
            tensors.norm("input_layernorm", hidden),
            tensors.matrix("self_attn.q_proj", query, hidden),
            tensors.matrix("self_attn.k_proj", kv, hidden),
            tensors.matrix("self_attn.v_proj", kv, hidden),
            tensors.output("self_attn.o_proj", hidden, query),
            tensors.norm("self_attn.q_norm", self.head_dim),
            tensors.norm("self_attn.k_norm", self.head_dim),
            tensors.norm("post_attention_layernorm", hidden),
            *(tensors.experts("mlp") if self.is_moe(layer) else dense),
        )


def _read_mlp(fields: FieldReader) -> dict[str, Any]:
    """Which of the two model types it is, and its experts."""
    if fields.get("model_type") != "qwen3_moe":
        return {"model_type": "qwen3"}
    return {
        "model_type": "qwen3_moe",
        **read_experts(fields, width="moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "decoder_sparse_step": fields.size("decoder_sparse_step", default=1),
        "mlp_only_layers": _read_layers(fields, "mlp_only_layers"),
    }


def _read_layers(fields: FieldReader, key: str) -> tuple[int, ...]:
    value, count = fields.get(key), fields.get("num_hidden_layers")
    if value is None:
        return ()
    whole = isinstance(value, list | tuple) and all(type(layer) is int for layer in value)
    is_counted = type(count) is int and count > 0
    if not whole or not all(x >= 0 and (not is_counted or x < count) for x in value):
        fields.fault(key, f"a list of layer numbers below num_hidden_layers ({count})")
        return ()
    return tuple(value)


def _refuse_variants(fields: FieldReader) -> None:
    fields.only("hidden_act", ("silu",))
    fields.only("attention_bias", (False,))
    fields.only("attention_dropout", (0,))
    fields.only("use_sliding_window", (False,))
    fields.get("sliding_window")  # only read by models that switch it on
    kinds = fields.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds)
    ):
        fields.fault("layer_types", "full_attention in every layer")
