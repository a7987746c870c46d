"""attention: one query at a time, over the positions that it may see."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.verify.operators.case import EDGE_ROWS, Arg, Case, generator, normal


def attention(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, *, scale: float) -> tuple[Tensor]:
    """Query s of head h over keys and values 0..s of head h // (H / G)."""
    share = q_BSHd.shape[2] // k_BSGd.shape[2]
    heads = torch.arange(q_BSHd.shape[2]) // share
    k_BSHd, v_BSHd = k_BSGd[:, :, heads], v_BSGd[:, :, heads]
    rows = []
    for s in range(q_BSHd.shape[1]):
        seen = k_BSHd[:, : s + 1]
        powers = (scale * torch.einsum("bhd,bthd->bth", q_BSHd[:, s], seen)).exp()
        shares = powers / powers.sum(1, keepdim=True)
        rows.append(torch.einsum("bth,bthd->bhd", shares, v_BSHd[:, : s + 1]))
    return (torch.stack(rows, dim=1) if rows else q_BSHd + k_BSHd + v_BSHd,)


def attention_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, *, batch: int, length: int, heads: tuple[int, int], width: int) -> Case:
        q, *kv = (
            normal(random, batch, length, count, width) for count in (heads[0], *heads[1:] * 2)
        )
        args = tuple(map(Arg, ("q", "k", "v"), (q, *kv)))
        # A query that sees one position alone has no gradient but what rounding leaves.
        return Case(name, args, {"scale": width**-0.5}, scale=1.0)

    for length in EDGE_ROWS:
        yield case(f"{length} positions", batch=1, length=length, heads=(2, 1), width=8)
    yield case("one key head", batch=2, length=6, heads=(3, 1), width=8)
    yield case("a key head a query head", batch=2, length=6, heads=(2, 2), width=8)
    yield case("head width 64", batch=1, length=33, heads=(4, 4), width=64)
    yield case("head width 128", batch=1, length=33, heads=(4, 1), width=128)
    views = case("views", batch=2, length=9, heads=(4, 2), width=16)
    # Kernels want the channels of a head side by side.
    yield from (view for view in views.laid_out() if view.layout != "columns")
