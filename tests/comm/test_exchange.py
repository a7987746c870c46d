"""Rows to the ranks that need them and sums back, against a loop over ranks and tokens."""

import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.collectives import CollectiveExchange
from pith.comm.exchange import Rows
from pith.comm.splits import SplitExchange

LOCAL, K = 2, 3  # more choices than experts of a rank: a token often needs a rank twice
Ids = list[Tensor]  # [T, K] of each rank
Place = tuple[int, int]  # a token: its rank, its number there


def equal_routings(ep: int) -> dict[str, Ids]:
    """Chosen experts where all ranks hold as many tokens."""
    last = LOCAL * (ep - 1)
    own = [LOCAL * ((rank + 1) % ep) for rank in range(ep)]
    return {
        "spread": choices(ep, 7, 0, LOCAL * ep),
        "all to the first rank": choices(ep, 4, 0, LOCAL),
        "the last rank receives nothing": choices(ep, 5, 0, last),
        "each to the next rank": [choices(1, 3, low, low + LOCAL)[0] for low in own],
        "one token": choices(ep, 1, last, LOCAL * ep),
        "no tokens": choices(ep, 0, 0, LOCAL * ep),
    }


def other_routings(ep: int) -> dict[str, Ids]:
    """What only split sizes can carry."""
    unwanted = choices(ep, 3, 0, LOCAL * ep)
    for ids_TK in unwanted:
        ids_TK[1] = -1
    uneven = [choices(1, 4 * rank, 0, LOCAL * ep)[0] for rank in range(ep)]
    return {"the first rank has no tokens": uneven, "a token that no rank needs": unwanted}


def choices(num_ranks: int, num_tokens: int, low: int, high: int) -> Ids:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens, K)
    return [torch.randint(low, high, shape, generator=generator) for _ in range(num_ranks)]


def draw(*key: object, rows: int) -> Rows:
    """bfloat16 [rows, 5], float32 [rows, 3] and float64 [rows, 2, 2]: other ones for each key.

    Five bfloat16 leave whatever is packed behind them at an odd place; float64 and ids are
    whole words.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    shapes = {torch.bfloat16: (5,), torch.float32: (K,), torch.float64: (2, 2)}
    return tuple(
        torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for dtype, shape in shapes.items()
    )


def arrivals(name: str, ids: Ids, rank: int) -> list[Place]:
    """The tokens whose rows `rank` should receive, in order."""
    here = range(rank * LOCAL, (rank + 1) * LOCAL)
    return [
        (source, token)
        for source, ids_TK in enumerate(ids)
        for token, chosen in enumerate(ids_TK.tolist())
        if name == "collectives" or any(expert in here for expert in chosen)
    ]


def strided(x: Tensor) -> Tensor:
    """Equal to `x`, but not contiguous in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def open_group(ep: int) -> dist.ProcessGroup:
    """Groups of `ep` ranks that lie apart, made on every rank."""
    size = dist.get_world_size()
    step = size // ep
    groups = [dist.new_group(list(range(first, size, step))) for first in range(step)]
    mine = groups[dist.get_rank() % step]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def exchange_all(ep: int) -> dict[tuple[str, str, str], Rows]:
    """Every case of both exchanges, all in flight at once, in memory full of NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.ones(1).new_empty(4).isnan().all()
    group = open_group(ep)
    rank = group.rank()
    even, uneven = equal_routings(ep), other_routings(ep)
    flying = {}
    for name, exchange, routings in (
        ("collectives", CollectiveExchange(group), even),
        ("splits", SplitExchange(group, LOCAL * ep), even | uneven),
    ):
        for case, ids in routings.items():
            route = exchange.route(ids[rank])
            brain, single, double = draw(case, rank, rows=len(ids[rank]))
            flying[name, case, "gather"] = route.gather_tokens(brain, single, ids[rank])
            flying[name, case, "gather whole words"] = route.gather_tokens(double, ids[rank])
            flying[name, case, "gather one"] = route.gather_tokens(strided(double))
            num_rows = len(arrivals(name, ids, rank))
            brain, single, double = draw(name, case, rank, rows=num_rows)
            flying[name, case, "reduce"] = route.reduce_tokens(strided(brain), strided(single))
            flying[name, case, "reduce one"] = route.reduce_tokens(strided(double))
    # Each rank waits in another order; on one, what was launched last comes first.
    keys = sorted(flying, key=lambda key: zlib.crc32(repr((rank, key)).encode()))
    keys = list(reversed(flying)) if rank == 0 else keys
    landed = {key: flying[key].wait() for key in keys}
    dist.barrier()  # a rank that leaves early may break connections
    return landed


def gathered(name: str, case: str, ids: Ids, rank: int) -> dict[str, Rows]:
    """What `rank` should receive."""
    rows = [(*draw(case, source, rows=len(ids_TK)), ids_TK) for source, ids_TK in enumerate(ids)]
    places = arrivals(name, ids, rank)

    def column(number: int) -> Tensor:
        empty = rows[0][number][:0]
        return torch.cat([empty, *(rows[source][number][token, None] for source, token in places)])

    return {
        "gather": (column(0), column(1), column(3)),
        "gather whole words": (column(2), column(3)),
        "gather one": (column(2),),
    }


def summed(name: str, case: str, ids: Ids, rank: int, *, wide: bool, order: int) -> Rows:
    """The sum of partial rows for each token of `rank`, one rank after another in `order` 1 or -1.

    `wide`: added up in float32 or wider and rounded once; else rounded with each addition.
    """
    ranks = range(len(ids))[::order]
    totals = draw(name, rows=len(ids[rank]))
    totals = tuple(x.zero_().to(torch.promote_types(x.dtype, torch.float32)) for x in totals)
    for other in ranks:
        places = arrivals(name, ids, other)
        partial = draw(name, case, other, rows=len(places))
        for number, (source, token) in enumerate(places):
            for total, x in zip(totals, partial, strict=True):
                if source == rank:
                    total[token] += x[number]
        if not wide:
            totals = tuple(t.to(x.dtype).to(t.dtype) for t, x in zip(totals, partial, strict=True))
    return tuple(t.to(x.dtype) for t, x in zip(totals, draw(name, rows=0), strict=True))


def equal(found: Rows, wanted: Rows) -> bool:
    """Whether types, shapes and bits are the same."""
    assert all(f.is_contiguous() for f in found)
    return [f.dtype for f in found] == [w.dtype for w in wanted] and all(
        map(torch.equal, found, wanted)
    )


@pytest.mark.parametrize(("num_ranks", "ep"), [(4, 2), (3, 3), (4, 4)])
def test_rows_arrive_in_order_and_sums_come_back_to_the_bit(
    run_ranks: Any, num_ranks: int, ep: int
) -> None:
    outcomes = run_ranks(num_ranks, exchange_all, ep)
    even, uneven = equal_routings(ep), other_routings(ep)
    cases = [(name, case, even[case]) for name in ("collectives", "splits") for case in even]
    cases += [("splits", case, uneven[case]) for case in uneven]
    for member, found in enumerate(outcomes):
        rank = member // (num_ranks // ep)
        for name, case, ids in cases:
            where = f"{name}, {case}, rank {rank}"
            for way, wanted in gathered(name, case, ids, rank).items():
                assert equal(found[name, case, way], wanted), f"{where}: {way}"
            brain, single, double = summed(name, case, ids, rank, wide=True, order=1)
            assert equal(found[name, case, "reduce"], (brain, single)), where
            assert equal(found[name, case, "reduce one"], (double,)), where

    if ep > 2:  # the same numbers tell apart other ways to sum, so that equal means something
        found = outcomes[0]["collectives", "spread", "reduce"]
        for wrong in ({"wide": False, "order": 1}, {"wide": True, "order": -1}):
            brain, single, _ = summed("collectives", "spread", even["spread"], 0, **wrong)
            assert not equal(found, (brain, single))
    assert outcomes[-1]["splits", "the last rank receives nothing", "gather one"][0].shape[0] == 0
    for found in outcomes:
        assert found["splits", "a token that no rank needs", "reduce one"][0][1].eq(0).all()


@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 2), (3, 3)])
def test_gather_and_reduce_are_each_the_adjoint_of_the_other(
    run_ranks: Any, num_ranks: int, ep: int
) -> None:
    outcomes = run_ranks(num_ranks, exchange_all, ep)
    for name, case in {key[:2] for key in outcomes[0]}:
        ids = (equal_routings(ep) | other_routings(ep))[case]
        there = back = 0.0
        for rank, found in enumerate(outcomes):
            x = draw(case, rank, rows=len(ids[rank]))[2]
            (gathered_x,), (reduced_y,) = (
                found[name, case, way] for way in ("gather one", "reduce one")
            )
            y = draw(name, case, rank, rows=len(gathered_x))[2]
            there += float((gathered_x * y).sum())
            back += float((x * reduced_y).sum())
        assert there == pytest.approx(back, rel=1e-12, abs=1e-12), f"{name}, {case}"
        assert there != 0 or case == "no tokens"


def refuse_uneven_blocks() -> None:
    with pytest.raises(AssertionError, match="must be equal"):
        SplitExchange(open_group(2), 5)
    dist.barrier()


def test_experts_that_cannot_be_shared_out_equally_are_refused(run_ranks: Any) -> None:
    run_ranks(2, refuse_uneven_blocks)
