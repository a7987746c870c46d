"""Qwen3, dense and MoE: a plain decoder whose query and key heads are normed."""

from torch import nn

from pith.arch.qwen3 import Qwen3
from pith.layer.attention import NormedHeadsAttention
from pith.models.stage import DecoderStage


class Qwen3Stage(DecoderStage[Qwen3]):
    """Layers of the model, with the embedding on the first stage and the head on the last."""

    def attention(self, number: int) -> nn.Module:
        """Grouped-query attention with an RMSNorm on each query and key head."""
        return NormedHeadsAttention(self.arch, parts=self.parts, dtype=self.dtype)
