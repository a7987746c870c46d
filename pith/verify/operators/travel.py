"""sort_pairs, gather_rows, weighted_sum: rows travel to their experts and back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.ops.pairs import Pairs
from pith.verify.operators.case import EDGE_ROWS, Arg, Case, Role, generator, normal

NUM_EXPERTS = 6


def sort_pairs(
    ids_RK: Tensor, counts_e: Tensor, *, first_expert: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of Pairs, by sorting (expert, pair) of the local experts."""
    assert num_experts >= first_expert + len(counts_e)
    flat, k = ids_RK.flatten().tolist(), ids_RK.shape[1]
    local = range(first_expert, first_expert + len(counts_e))
    order = [pair for _, pair in sorted((e, p) for p, e in enumerate(flat) if e in local)]
    places = {pair: place for place, pair in enumerate(order)}
    position = [places.get(pair, len(order)) for pair in range(len(flat))]
    return (
        torch.tensor([pair // k for pair in order], dtype=torch.int64),
        torch.tensor(order, dtype=torch.int64),
        torch.tensor(position, dtype=torch.int64).view(ids_RK.shape),
        torch.tensor([flat.count(expert) for expert in local], dtype=torch.int64),
    )


def sort_pairs_cases() -> Iterator[Case]:
    for name, ids_RK, first, count in _choices(generator()):
        args = (
            Arg("ids", ids_RK, Role.PLAIN),
            Arg("counts", _counts(ids_RK, first, count), Role.PLAIN),
        )
        yield Case(name, args, {"first_expert": first, "num_experts": NUM_EXPERTS})


def gather_rows(x_RD: Tensor, pairs: Pairs) -> tuple[Tensor]:
    """A matrix of ones, one a pair, times the rows."""
    one_hot_PR = (pairs.row_P.unsqueeze(1) == torch.arange(x_RD.shape[0])).to(x_RD.dtype)
    return (one_hot_PR @ x_RD,)


def gather_rows_cases() -> Iterator[Case]:
    random = generator()
    for name, ids_RK, first, count in _choices(random):
        x = Arg("x", normal(random, ids_RK.shape[0], 5))
        case = Case(name, (x, Arg("pairs", _pairs(ids_RK, first, count), Role.PLAIN)))
        yield case
        if name == "some local":
            yield from case.laid_out()


def weighted_sum(rows_PD: Tensor, weights_RK: Tensor, pairs: Pairs) -> tuple[Tensor]:
    """A matrix with each weight at the place of its pair, times the rows."""
    places = torch.arange(rows_PD.shape[0])
    hit_RKP = (pairs.position_RK.unsqueeze(-1) == places).to(rows_PD.dtype)
    return (torch.einsum("rk,rkp,pd->rd", weights_RK, hit_RKP, rows_PD),)


def weighted_sum_cases() -> Iterator[Case]:
    random = generator()
    for name, ids_RK, first, count in _choices(random):
        pairs = _pairs(ids_RK, first, count)
        rows = Arg("rows", normal(random, pairs.row_P.shape[0], 5))
        weights = Arg("weights", normal(random, *ids_RK.shape), Role.WIDE_LEAF)
        case = Case(name, (rows, weights, Arg("pairs", pairs, Role.PLAIN)))
        yield case
        if name == "some local":
            yield from case.laid_out()


def _choices(random: torch.Generator) -> Iterator[tuple[str, Tensor, int, int]]:
    """Chosen experts [R, K], the first local expert and how many are local."""
    for rows in EDGE_ROWS:
        ids = normal(random, rows, NUM_EXPERTS).argsort(dim=1)[:, :3]
        yield f"{rows} rows", ids, 0, NUM_EXPERTS
    ids = normal(random, 33, NUM_EXPERTS).argsort(dim=1)[:, :2]
    for name, first, count in (("some local", 2, 3), ("first local", 0, 3), ("one local", 5, 1)):
        yield name, ids, first, count
    yield "all on one", torch.full((9, 1), 3), 0, NUM_EXPERTS
    for name, expert in (("first empty", 0), ("middle empty", 3), ("last empty", 5)):
        yield name, (expert + 1 + ids % (NUM_EXPERTS - 1)) % NUM_EXPERTS, 0, NUM_EXPERTS
    yield "nobody comes", ids % 2, 3, 3


def _counts(ids_RK: Tensor, first: int, count: int) -> Tensor:
    return (ids_RK.flatten() == torch.arange(first, first + count).unsqueeze(1)).sum(1)


def _pairs(ids_RK: Tensor, first: int, count: int) -> Pairs:
    counts_e = _counts(ids_RK, first, count)
    return Pairs(*sort_pairs(ids_RK, counts_e, first_expert=first, num_experts=NUM_EXPERTS))
