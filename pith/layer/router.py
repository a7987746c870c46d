"""The router: which experts each token goes to, decided in float32 or wider."""

from functools import partial

import torch
from torch import Tensor

from pith.layer.balance import attach_losses
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
        return self.decide(self.score(tokens_TD), context)

    def score(self, tokens_TD: Tensor) -> Tensor:
        """Tokens -> logits [T, E], float32 or wider."""
        linear = self.parts.operators.linear
        return linear(widen(tokens_TD), self.weight, sink=self.parts.sink)

    def decide(self, logits_TE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Logits -> (ids, weights), which carry the losses of the router."""
        probs_TE, weights_TK, ids_TK = self._route(logits_TE, context)
        return ids_TK, attach_losses(
            weights_TK, logits_TE, self.balanced(probs_TE), ids_TK, context, layer=self.layer
        )

    def balanced(self, probs_TE: Tensor) -> Tensor:
        """The probabilities of which the balance loss takes the means, weighted by a family."""
        return probs_TE

    def _route(self, logits_TE: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, weights and ids: of the k best experts, or of those that replace them."""
        route = partial(
            self.parts.operators.topk_route, logits_TE, k=self.top_k, normalize=self.normalize
        )
        best = route()
        if context.routing is None:
            return best
        return route(chosen_TK=context.routing.choose(self.layer, best[-1]))
