"""Tiny models of the family, ours and the one of transformers, with equal weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pith.arch.qwen3 import Qwen3
from pith.comm.exchange import LocalExchange
from pith.layer.protocol import Context, Parts, RouterLosses
from pith.models.qwen3 import Qwen3Stage
from pith.ops import choose
from pith.ops.sink import GradSink

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERT_FIELDS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
DENSE = {key: value for key, value in MOE.items() if key not in EXPERT_FIELDS} | {
    "model_type": "qwen3"
}
CONFIGS = {
    "moe": MOE,
    "moe-raw-weights": MOE | {"norm_topk_prob": False},
    "moe-mixed": MOE | {"mlp_only_layers": [0, 2]},
    "moe-every-second": MOE | {"decoder_sparse_step": 2},
    "moe-tied": MOE | {"tie_word_embeddings": True},
    "dense": DENSE,
    "dense-tied": DENSE | {"tie_word_embeddings": True},
}


@dataclass
class Records:
    """A meter that keeps what it is told."""

    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        self.loads[layer] = self.loads.get(layer, 0) + load_E
        self.losses[layer] = self.losses.get(layer, 0) + balance_loss


class Float64Oracle(TorchFunctionMode):
    """Runs foreign code that asks for float32 by name in float64 instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {key: wide(value) for key, value in (kwargs or {}).items()}
        return func(*(wide(value) for value in args), **named)


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(CONFIGS[request.param])


@pytest.fixture
def moe_config() -> dict[str, Any]:
    return dict(MOE)


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def float64_oracle() -> type[Float64Oracle]:
    return Float64Oracle


@pytest.fixture
def whole_model() -> Callable[..., Qwen3Stage]:
    """Builds the whole model in one stage, its weights drawn from one seed."""

    def build(
        config: dict[str, Any],
        dtype: torch.dtype,
        *,
        sink: GradSink | None = None,
        overrides: dict[str, str] | None = None,
    ) -> Qwen3Stage:
        arch = Qwen3.from_config(config)
        parts = Parts(choose("cpu", overrides or {}), LocalExchange(), sink, arch.num_experts, 0)
        stage = Qwen3Stage(
            arch,
            range(arch.num_layers),
            is_first=True,
            is_last=True,
            parts=parts,
            dtype=dtype,
            device="cpu",
        )
        generator = torch.Generator().manual_seed(0)
        for name, parameter in stage.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(mean + 0.3 * values)
        if arch.tie_word_embeddings:
            stage.tie_to(stage.embed_tokens.weight)
        return stage

    return build


@pytest.fixture
def context_for(records: Records) -> Callable[..., Context]:
    """The context of a batch of sequences that all start at position 0."""

    def build(stage: Qwen3Stage, length: int, losses: RouterLosses | None = None) -> Context:
        cos_BSd, sin_BSd = stage.rotary(torch.arange(length).unsqueeze(0))
        return Context(cos_BSd, sin_BSd, records, losses or RouterLosses())

    return build


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and labels [B, S] with some that are not counted."""
    tokens_BS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[0, 3:7] = -100
    return tokens_BS, labels_BS
