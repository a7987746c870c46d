"""Softmax over all experts, then the k best."""

from torch import Tensor

from pith.ops.precision import widen


def topk_route(logits_TE: Tensor, *, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits -> (probs [T, E], weights [T, K], ids [T, K] int64), float32 or wider.

    Experts come best first; of equal logits the lower id wins. `normalize` makes the k weights of
    a token sum to one.
    """
    logits = widen(logits_TE)
    probs_TE = logits.softmax(dim=-1)
    # torch.topk breaks ties as it likes. Logits decide: rounding makes ties among probabilities.
    ids_TK = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_TK = probs_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return probs_TE, weights_TK, ids_TK
