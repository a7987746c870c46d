"""topk_route: sorting by falling logit, then by rising expert."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.verify.operators.case import EDGE_ROWS, Arg, Case, generator, normal


def topk_route(
    logits_TE: Tensor, *, k: int, normalize: bool, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities as shares of exponentials, weights of the chosen, and the chosen."""
    powers_TE = logits_TE.exp()
    ids_TK = _sorted(logits_TE, k) if chosen_TK is None else chosen_TK
    chosen = powers_TE.gather(1, ids_TK)
    whole = (chosen if normalize else powers_TE).sum(1, keepdim=True)
    return powers_TE / powers_TE.sum(1, keepdim=True), chosen / whole, ids_TK


def _sorted(logits_TE: Tensor, k: int) -> Tensor:
    rows = [_best_first(row)[:k] for row in logits_TE.tolist()]
    return torch.tensor(rows, dtype=torch.int64).view(logits_TE.shape[0], k)


def _best_first(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))


def topk_route_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, logits: Tensor, *, k: int, normalize: bool = True) -> Case:
        return Case(name, (Arg("logits", logits),), {"k": k, "normalize": normalize})

    for rows in EDGE_ROWS:
        yield case(f"{rows} tokens", normal(random, rows, 16), k=4, normalize=rows % 2 == 0)
    yield case("many tokens", normal(random, 512, 64), k=8)
    yield case("coarse logits, many ties", (2 * normal(random, 256, 32)).round() / 2, k=8)
    yield case("all equal", torch.full((5, 16), 0.5, dtype=torch.float64), k=4)
    yield case("zeros of both signs", _zeros(), k=3, normalize=False)
    yield case("one bit apart", _neighbours(), k=2)
    yield case("odd count, all chosen", normal(random, 9, 7), k=7)
    yield case("the best one", normal(random, 9, 7), k=1, normalize=False)
    logits = normal(random, 33, 6)
    worst_TK = logits.argsort(dim=1)[:, :3]
    for normalize in (True, False):
        yield Case(
            f"experts given, {'normalized' if normalize else 'not normalized'}",
            (Arg("logits", logits),),
            {"k": 3, "normalize": normalize, "chosen_TK": worst_TK},
        )
    yield from case("views", normal(random, 9, 16), k=4, normalize=False).laid_out()


def _zeros() -> Tensor:
    """Logits of 0.0 and -0.0, which are equal, and of nothing else but one lower value."""
    signs = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0], [-0.0, 0.0, -0.0, -1.0, 0.0]])
    return signs.double()


def _neighbours() -> Tensor:
    """Logits of 1, the last one the next larger number of float32."""
    logits = torch.ones(5, 64)
    logits[:, 63] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    return logits.double()
