"""One pipeline stage of a decoder: tokens, layers, logits, loss.

The whole model is one stage. What stands here is a plain decoder; a family says where it differs.
Parameter names are the canonical ones of the family in `pith.arch`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from pith.arch.decoder import Decoder
from pith.layer.attention import GroupedQueryAttention
from pith.layer.experts import DenseMlp, Experts, MixtureOfExperts
from pith.layer.five_stages import DecoderLayer
from pith.layer.protocol import Carry, Context, Parts
from pith.layer.rotary import rotary
from pith.layer.router import Router
from pith.layer.weights import Embedding, Linear, RMSNorm

Arch = TypeVar("Arch", bound=Decoder)


class DecoderStage(nn.Module, Generic[Arch]):
    """Layers `layers` of the model, with the embedding on the first and the head on the last.

    Parameters are created empty, on the meta device unless told otherwise. A family overrides
    `new_layer`, or one of the parts that it is made of.
    """

    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(
        self,
        arch: Arch,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        parts: Parts,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.arch, self.parts, self.dtype = arch, parts, dtype
        self.is_first, self.is_last = is_first, is_last
        table = (arch.vocab_size, arch.hidden_size)
        with torch.device(device):
            if is_first:
                self.embed_tokens = Embedding(table, parts=parts, dtype=dtype)
            self.layers = nn.ModuleDict({str(n): self.new_layer(n) for n in layers})
            if is_last:
                eps = arch.rms_norm_eps
                self.norm = RMSNorm(arch.hidden_size, eps=eps, parts=parts, dtype=dtype)
                self.lm_head = Linear(table, parts=parts, dtype=dtype)

    def new_layer(self, number: int) -> nn.Module:
        """The layer of this number."""
        return self.layer_type(
            self.arch.hidden_size,
            attention=self.attention(number),
            mlp=self.mlp(number),
            eps=self.arch.rms_norm_eps,
            parts=self.parts,
            dtype=self.dtype,
        )

    def attention(self, number: int) -> nn.Module:
        """The attention of layer `number`: plain grouped-query attention with rope."""
        return GroupedQueryAttention(self.arch, parts=self.parts, dtype=self.dtype)

    def mlp(self, number: int) -> DenseMlp | MixtureOfExperts:
        """One SwiGLU for all tokens, or in a layer with experts softmax, the top k of them."""
        arch = self.arch
        if not arch.is_moe(number):
            width = arch.intermediate_size
            return DenseMlp(arch.hidden_size, intermediate_size=width, **self.made_of)
        return MixtureOfExperts(gate=self.router(number), experts=self.experts())

    def router(self, number: int) -> nn.Module:
        """The router of layer `number`."""
        arch = self.arch
        return Router(
            (arch.num_choices, arch.hidden_size),
            layer=number,
            top_k=arch.top_k,
            normalize=arch.norm_topk_prob,
            **self.made_of,
        )

    def experts(self) -> Experts:
        """This rank's experts of a layer. Choices beyond them count as those of another rank."""
        arch = self.arch
        return Experts(
            arch.hidden_size,
            intermediate_size=arch.moe_intermediate_size,
            num_experts=arch.num_choices,
            **self.made_of,
        )

    @property
    def made_of(self) -> dict[str, Any]:
        """What every module is given."""
        return {"parts": self.parts, "dtype": self.dtype}

    def forward(self, tokens_BS: Tensor, context: Context) -> Tensor:
        """The whole model in plain order: token ids [B, S] -> logits [B, S, V]."""
        carry = self.embed(tokens_BS)
        for layer in self.layers.values():
            carry = layer(carry, context)
        return self.logits(carry)

    def embed(self, tokens_BS: Tensor) -> Carry:
        """Token ids [B, S] -> hidden states [B, S, D]. First stage only."""
        return Carry(self.embed_tokens(tokens_BS))

    def logits(self, carry: Carry) -> Tensor:
        """[B, S, V]. Last stage only."""
        return cast(Tensor, self.lm_head(self.norm(carry.hidden_BSD)))

    def loss(self, carry: Carry, labels_BS: Tensor) -> Tensor:
        """Scalar sum of the token losses, float32 or wider; -100 is not counted. Last stage."""
        logits_TV = self.logits(carry).flatten(0, 1)
        return self.parts.operators.cross_entropy(logits_TV, labels_BS.flatten())

    def rotary(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Positions -> cosines and sines [B or 1, S, d] in float32 or wider."""
        arch = self.arch
        return rotary(positions_BS, width=arch.head_dim, base=arch.rope_theta, dtype=self.dtype)

    def expert_modules(self) -> Iterator[nn.Module]:
        """The modules that hold nothing but stacked experts."""
        for layer in self.layers.values():
            if isinstance(layer.mlp, MixtureOfExperts):
                yield layer.mlp.experts

    def tie_to(self, embedding: nn.Parameter) -> None:
        """Let the head share the storage of `embedding`, staying a parameter of its own."""
        self.lm_head.weight = nn.Parameter(embedding.detach())
