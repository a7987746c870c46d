"""The router: which experts each token goes to, decided in float32 or wider."""

import torch
from torch import Tensor

from pith.layer.balance import balance
from pith.layer.protocol import Context, Parts
from pith.layer.weights import Weighted
from pith.ops.precision import widen


class Router(Weighted):
    """Softmax over all experts, then the top k; weight [E, D]."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        layer: int,
        top_k: int,
        normalize: bool,
        parts: Parts,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, parts=parts, dtype=dtype)
        self.layer, self.top_k, self.normalize = layer, top_k, normalize

    def forward(self, tokens_TD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Tokens -> (ids [T, K] int64, weights [T, K] float32 or wider)."""
        operators = self.parts.operators
        logits_TE = operators.linear(widen(tokens_TD), self.weight, sink=self.parts.sink)
        probs_TE, weights_TK, ids_TK = operators.topk_route(
            logits_TE, k=self.top_k, normalize=self.normalize
        )
        return ids_TK, balance(weights_TK, probs_TE, ids_TK, context, layer=self.layer)
