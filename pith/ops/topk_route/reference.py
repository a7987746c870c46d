"""Softmax over all experts, then the k best."""

from torch import Tensor

from pith.ops.precision import widen


def topk_route(
    logits_TE: Tensor, *, k: int, normalize: bool, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits -> (probs [T, E], weights [T, K], ids [T, K] int64), float32 or wider.

    Experts come best first; of equal logits the lower id wins. `chosen_TK` [T, K] int64 names the
    experts instead. `normalize` makes the k weights of a token sum to one.
    """
    logits = widen(logits_TE)
    probs_TE = logits.softmax(dim=-1)
    ids_TK = _best(logits, k) if chosen_TK is None else chosen_TK
    assert ids_TK.shape == (len(logits), k), f"ids {tuple(ids_TK.shape)}, not {(len(logits), k)}"
    weights_TK = probs_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return probs_TE, weights_TK, ids_TK


def _best(logits_TE: Tensor, k: int) -> Tensor:
    # torch.topk breaks ties as it likes. Logits decide: rounding makes ties among probabilities.
    return logits_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
