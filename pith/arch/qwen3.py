"""Qwen3: pre-norm decoders, grouped-query attention with q and k norms, dense or MoE layers.

Everything about the family that can be known without tensors: its sizes, its parameters, its
FLOPs and its Hugging Face names (model types qwen3 and qwen3_moe).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from pith.arch.fields import FieldReader, is_positive, nearest_divisors, refuse
from pith.arch.parameter import ParameterSpec, Role

MODEL_TYPES = ("qwen3_moe", "qwen3")
MAX_LAYERS = 1024
MAX_EXPERTS = 65536


@dataclass(frozen=True, slots=True)
class Qwen3:
    """The sizes of one model. `num_experts` is 0 for a dense model; weights are [out, in]."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    initializer_range: float
    max_position_embeddings: int
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Qwen3":
        """Build from config.json fields. Raises RequestError listing every fault at once."""
        fields = FieldReader(config)
        arch = cls.examine(fields)
        refuse(tuple(fields.faults))
        return arch

    @classmethod
    def examine(cls, fields: FieldReader) -> "Qwen3":
        """Read all fields; what is wrong lands in `fields.faults` and gets a stand-in value."""
        sparse = _read_experts(fields)
        _refuse_variants(fields)
        arch = cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            num_layers=fields.size("num_hidden_layers", maximum=MAX_LAYERS),
            num_heads=fields.size("num_attention_heads"),
            num_kv_heads=fields.size("num_key_value_heads"),
            head_dim=_read_head_dim(fields),
            intermediate_size=fields.size("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_read_rope(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            attention_bias=False,
            initializer_range=fields.number("initializer_range", default=0.02),
            max_position_embeddings=fields.size("max_position_embeddings"),
            ignored=fields.unknown(),
            **sparse,
        )
        _check_relations(fields, arch)
        return arch

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one dense MLP."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Every canonical tensor in model order; a tied head is the embedding and not listed."""
        std, shape = self.initializer_range, (self.vocab_size, self.hidden_size)
        specs = [ParameterSpec("embed_tokens.weight", shape, Role.EMBEDDING, None, std)]
        for layer in range(self.num_layers):
            specs += self.layer_parameters(layer)
        specs.append(ParameterSpec("norm.weight", (self.hidden_size,), Role.NORM, None, fill=1.0))
        if not self.tie_word_embeddings:
            specs.append(ParameterSpec("lm_head.weight", shape, Role.HEAD, None, std))
        return tuple(specs)

    def layer_parameters(self, layer: int) -> tuple[ParameterSpec, ...]:
        """The tensors of one layer."""
        return (*self._attention_parameters(layer), *self._mlp_parameters(layer))

    def _attention_parameters(self, layer: int) -> tuple[ParameterSpec, ...]:
        hidden, std = self.hidden_size, self.initializer_range
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def matrix(name: str, shape: tuple[int, int], std: float) -> ParameterSpec:
            name = f"layers.{layer}.self_attn.{name}.weight"
            return ParameterSpec(name, shape, Role.MATRIX, layer, std)

        def norm(name: str, width: int) -> ParameterSpec:
            name = f"layers.{layer}.{name}.weight"
            return ParameterSpec(name, (width,), Role.NORM, layer, fill=1.0)

        return (
            norm("input_layernorm", hidden),
            matrix("q_proj", (query, hidden), std),
            matrix("k_proj", (kv, hidden), std),
            matrix("v_proj", (kv, hidden), std),
            matrix("o_proj", (hidden, query), self._output_std),
            norm("self_attn.q_norm", self.head_dim),
            norm("self_attn.k_norm", self.head_dim),
            norm("post_attention_layernorm", hidden),
        )

    def _mlp_parameters(self, layer: int) -> tuple[ParameterSpec, ...]:
        hidden, std, prefix = self.hidden_size, self.initializer_range, f"layers.{layer}.mlp"
        if not self.is_moe(layer):
            width, role = self.intermediate_size, Role.MATRIX
            stack: tuple[int, ...] = ()
            router: tuple[ParameterSpec, ...] = ()
        else:
            width, role, stack = self.moe_intermediate_size, Role.EXPERTS, (self.num_experts,)
            name, shape = f"{prefix}.gate.weight", (self.num_experts, hidden)
            router = (ParameterSpec(name, shape, Role.ROUTER, layer, std),)
            prefix += ".experts"

        def projection(name: str, out: int, into: int, std: float) -> ParameterSpec:
            name = f"{prefix}.{name}.weight"
            return ParameterSpec(name, (*stack, out, into), role, layer, std)

        return (
            *router,
            projection("gate_proj", width, hidden, std),
            projection("up_proj", width, hidden, std),
            projection("down_proj", hidden, width, self._output_std),
        )

    @property
    def _output_std(self) -> float:
        return self.initializer_range / sqrt(2 * self.num_layers)

    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return sum(spec.num_elements for spec in self.parameters())

    def num_active_parameters(self) -> int:
        """The parameters that one token meets: top_k of the experts, everything else."""
        return sum(self._num_active(spec) for spec in self.parameters())

    def _num_active(self, spec: ParameterSpec) -> int:
        if spec.role is not Role.EXPERTS:
            return spec.num_elements
        return spec.num_elements // self.num_experts * self.top_k

    def layer_costs(self, sequence_length: int, *, causal: bool = True) -> tuple[float, ...]:
        """FLOPs per token of each layer, forward and backward.

        Six per active weight of a matrix product, and 12 S per query channel for the two attention
        products (halved where the mask is causal). Norms, rope and softmax are not counted.
        """
        attention = 12.0 * sequence_length * self.num_heads * self.head_dim / (2 if causal else 1)
        return tuple(
            attention
            + 6.0
            * sum(
                self._num_active(spec)
                for spec in self.layer_parameters(layer)
                if spec.role is not Role.NORM
            )
            for layer in range(self.num_layers)
        )

    def head_cost(self, sequence_length: int) -> float:
        """FLOPs per token of the output projection; the length makes no difference to it."""
        return 6.0 * self.vocab_size * self.hidden_size

    def embedding_cost(self, sequence_length: int) -> float:
        """FLOPs per token of the embedding: a look-up, none at any length."""
        return 0.0

    def flops_per_token(self, sequence_length: int, *, causal: bool = True) -> float:
        """FLOPs per token of the whole model, forward and backward, head included."""
        layers = sum(self.layer_costs(sequence_length, causal=causal))
        return layers + self.embedding_cost(sequence_length) + self.head_cost(sequence_length)

    def hf_name(self, name: str) -> tuple[str, ...]:
        """The Hugging Face names of one canonical tensor; stacked experts have one per expert."""
        if name == "lm_head.weight":
            return (name,)
        head, stacked, projection = name.partition(".experts.")
        if not stacked:
            return (f"model.{name}",)
        return tuple(f"model.{head}.experts.{e}.{projection}" for e in range(self.num_experts))


def _read_experts(fields: FieldReader) -> dict[str, Any]:
    if fields.get("model_type") != "qwen3_moe":
        none = {"num_experts": 0, "top_k": 0, "moe_intermediate_size": 0, "norm_topk_prob": False}
        return {"model_type": "qwen3", **none}
    key = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    if fields.get(key) is None:
        key = "num_experts"
    return {
        "model_type": "qwen3_moe",
        "num_experts": fields.size(key, maximum=MAX_EXPERTS),
        "top_k": fields.size("num_experts_per_tok"),
        "moe_intermediate_size": fields.size("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "decoder_sparse_step": fields.size("decoder_sparse_step", default=1),
        "mlp_only_layers": _read_layers(fields, "mlp_only_layers"),
    }


def _read_layers(fields: FieldReader, key: str) -> tuple[int, ...]:
    value, count = fields.get(key), fields.get("num_hidden_layers")
    if value is None:
        return ()
    whole = isinstance(value, list | tuple) and all(type(layer) is int for layer in value)
    if not whole or not all(x >= 0 and (type(count) is not int or x < count) for x in value):
        fields.fault(key, f"a list of layer numbers below num_hidden_layers ({count})")
        return ()
    return tuple(value)


def _read_head_dim(fields: FieldReader) -> int:
    """`head_dim`; an MoE config may leave it to hidden_size over the heads."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    default = None
    if fields.get("model_type") == "qwen3_moe" and fields.holds("hidden_size"):
        default = hidden // heads if type(heads) is int and 0 < heads <= hidden else None
    head_dim = fields.size("head_dim", default=default)
    if fields.holds("head_dim") and head_dim % 2:
        nearest = (str(head_dim - 1), str(head_dim + 1))
        fields.fault("head_dim", "an even number: rope rotates pairs", nearest=nearest)
    return head_dim


def _read_rope(fields: FieldReader) -> float:
    """The rope base, from either spelling; any scaling of it is refused by name."""
    bases = {} if fields.get("rope_theta") is None else {"rope_theta": fields.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        table = fields.get(key)
        if table is None:
            continue
        kind = _rope_kind(table)
        if kind != "default":
            fields.fault(key, f"rope of type default; {kind} is not implemented for this family")
        elif table.get("rope_theta") is not None:
            bases[key] = table["rope_theta"]
    where = next(iter(bases), "rope_theta")
    if not bases or not all(is_positive(base) for base in bases.values()):
        fields.fault(where, "a rope base: a finite number above 0")
        return 1.0
    if len(set(bases.values())) > 1:
        fields.fault(where, f"one rope base, not {bases}")
    return float(bases[where])


def _rope_kind(table: Any) -> str:
    """What a rope table asks for: "default", or the name of what goes beyond it."""
    if not isinstance(table, Mapping):
        return repr(table)
    names = {str(table[key]) for key in ("type", "rope_type") if table.get(key) is not None}
    more = {key for key in table if table[key] is not None} - {"type", "rope_type", "rope_theta"}
    extra = sorted(key for key in more if not (key == "partial_rotary_factor" and table[key] == 1))
    return " with ".join(("/".join(sorted(names or {"default"})), *extra))


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


def _check_relations(fields: FieldReader, arch: Qwen3) -> None:
    if fields.holds("num_attention_heads", "num_key_value_heads") and (
        arch.num_heads % arch.num_kv_heads
    ):
        wanted = f"a divisor of num_attention_heads ({arch.num_heads})"
        nearest = nearest_divisors(arch.num_heads, near=arch.num_kv_heads)
        fields.fault("num_key_value_heads", wanted, nearest=nearest)
    if fields.holds("num_experts", "num_local_experts", "num_experts_per_tok") and (
        arch.top_k > arch.num_experts
    ):
        wanted = f"at most num_experts ({arch.num_experts})"
        fields.fault("num_experts_per_tok", wanted, nearest=(str(arch.num_experts),))
