"""What decoder-only families share: their sizes, the tensors around the layers, FLOPs, names.

A family adds its own fields and says what a layer holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Self

from pith.arch.fields import FieldReader, refuse
from pith.arch.parameter import ParameterSpec, Role

MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)  # no slots: with them super() fails before Python 3.14
class Decoder:
    """A pre-norm decoder with grouped-query attention. `num_experts` is 0 for a dense model.

    `intermediate_size` is the width of a dense MLP, `moe_intermediate_size` of one expert; weights
    are [out, in]. `ignored` are the config keys that nobody read.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int = 0
    num_experts: int = 0
    top_k: int = 0
    norm_topk_prob: bool = False
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    initializer_range: float
    max_position_embeddings: int
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build from config.json fields. Raises RequestError listing every fault at once."""
        fields = FieldReader(config)
        arch = cls.examine(fields)
        refuse(tuple(fields.faults))
        return arch

    @classmethod
    def examine(cls, fields: FieldReader) -> Self:
        """Read all fields; what is wrong lands in `fields.faults` and gets a stand-in value."""
        raise NotImplementedError(cls.__name__)

    @property
    def num_choices(self) -> int:
        """What a router chooses among: the experts, and what a family has beside them."""
        return self.num_experts

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one dense MLP."""
        return self.num_experts > 0

    def layer_parameters(self, layer: int) -> tuple[ParameterSpec, ...]:
        """The tensors of one layer, in model order."""
        raise NotImplementedError(type(self).__name__)

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

    def carry_shapes(self, batch_size: int, length: int) -> tuple[tuple[int, ...], ...]:
        """What travels between layers and stages for so many sequences of so many tokens: hidden
        states [B, S, D], then the extra tensors of a family that has some."""
        return ((batch_size, length, self.hidden_size),)

    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return sum(spec.num_elements for spec in self.parameters())

    def num_active_parameters(self) -> int:
        """The parameters that one token meets: top_k of the experts, everything else."""
        return sum(self.num_active(spec) for spec in self.parameters())

    def num_active(self, spec: ParameterSpec) -> int:
        """The elements of one tensor that one token meets."""
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
                self.num_active(spec)
                for spec in self.layer_parameters(layer)
                if spec.role not in (Role.NORM, Role.BIAS)
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


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Spells the tensors of one layer: canonical names, shapes and initial values."""

    arch: Decoder
    layer: int

    def norm(self, name: str, width: int) -> ParameterSpec:
        """The weight [width] of an RMSNorm, one at first."""
        return ParameterSpec(self._name(name), (width,), Role.NORM, self.layer, fill=1.0)

    def matrix(self, name: str, num_out: int, num_in: int) -> ParameterSpec:
        """A projection [out, in] inside a block."""
        std = self.arch.initializer_range
        return ParameterSpec(self._name(name), (num_out, num_in), Role.MATRIX, self.layer, std)

    def output(self, name: str, num_out: int, num_in: int) -> ParameterSpec:
        """A projection [out, in] that ends a block: smaller at first, by sqrt(2 * layers)."""
        shape = (num_out, num_in)
        return ParameterSpec(self._name(name), shape, Role.MATRIX, self.layer, self._output_std)

    def tensor(self, name: str, shape: tuple[int, ...], role: Role) -> ParameterSpec:
        """A tensor of any shape and role, drawn as wide as a projection inside a block."""
        std = self.arch.initializer_range
        return ParameterSpec(self._name(name), shape, role, self.layer, std)

    def swiglu(self, prefix: str, width: int) -> tuple[ParameterSpec, ...]:
        """The three projections of a dense MLP of this width."""
        hidden = self.arch.hidden_size
        return (
            self.matrix(f"{prefix}.gate_proj", width, hidden),
            self.matrix(f"{prefix}.up_proj", width, hidden),
            self.output(f"{prefix}.down_proj", hidden, width),
        )

    def experts(self, prefix: str) -> tuple[ParameterSpec, ...]:
        """The router, and the three projections of all experts, stacked [E, out, in]."""
        arch, std = self.arch, self.arch.initializer_range
        hidden, width = arch.hidden_size, arch.moe_intermediate_size

        def stack(name: str, num_out: int, num_in: int, std: float) -> ParameterSpec:
            shape = (arch.num_experts, num_out, num_in)
            name = self._name(f"{prefix}.experts.{name}")
            return ParameterSpec(name, shape, Role.EXPERTS, self.layer, std)

        return (
            self.tensor(f"{prefix}.gate", (arch.num_choices, hidden), Role.ROUTER),
            stack("gate_proj", width, hidden, std),
            stack("up_proj", width, hidden, std),
            stack("down_proj", hidden, width, self._output_std),
        )

    def _name(self, name: str) -> str:
        return f"layers.{self.layer}.{name}.weight"

    @property
    def _output_std(self) -> float:
        return self.arch.initializer_range / sqrt(2 * self.arch.num_layers)
