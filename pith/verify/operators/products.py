"""linear, embedding, grouped_linear: products with a weight, whose gradient a sink may take."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pith.verify.operators.case import EDGE_ROWS, Arg, Case, Role, generator, normal

COUNTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("kernel edges", (0, 1, 127, 128, 129)),
    ("all on one", (0, 0, 385, 0, 0)),
    ("first empty", (0, 3, 4, 5, 6)),
    ("middle empty", (3, 4, 0, 5, 6)),
    ("last empty", (3, 4, 5, 6, 0)),
    ("nothing", (0, 0, 0, 0, 0)),
)
NUM_PAST = 9


def linear(x: Tensor, weight_FD: Tensor) -> tuple[Tensor]:
    """Every row times every row of the weight."""
    return (torch.einsum("...d,fd->...f", x, weight_FD),)


def linear_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, *shape: int, width: int = 24) -> Case:
        weight = Arg("weight", normal(random, width, shape[-1]), Role.WEIGHT)
        return Case(name, (Arg("x", normal(random, *shape)), weight))

    for rows in EDGE_ROWS:
        yield case(f"{rows} rows", rows, 32)
    yield case("sequences", 2, 5, 7, width=3)
    yield case("width 1", 5, 1, width=1)
    yield case("wide", 64, 512, width=256)
    yield from case("views", 2, 9, 16).laid_out()


def embedding(ids: Tensor, weight_VD: Tensor) -> tuple[Tensor]:
    """A matrix of ones, one a row, times the table."""
    one_hot = (ids.unsqueeze(-1) == torch.arange(weight_VD.shape[0])).to(weight_VD.dtype)
    return (one_hot @ weight_VD,)


def embedding_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, ids: Tensor, *, size: int = 50, width: int = 16) -> Case:
        weight = Arg("weight", normal(random, size, width), Role.WEIGHT)
        return Case(name, (Arg("ids", ids, Role.PLAIN), weight))

    for rows in EDGE_ROWS:
        yield case(f"{rows} ids", torch.randint(50, (rows,), generator=random))
    yield case("one id over and over", torch.full((3, 40), 7))
    yield case("first and last id", torch.tensor([0, 49, 0]), width=7)
    yield from case("views", torch.randint(50, (2, 9), generator=random)).laid_out()


def grouped_linear(x_PD: Tensor, weight_eFD: Tensor, counts_e: Tensor) -> tuple[Tensor]:
    """Each row times the weight of its expert; zeros for rows past the last expert."""
    expert_P = torch.repeat_interleave(torch.arange(counts_e.shape[0]), counts_e)
    used = expert_P.shape[0]
    y_PF = torch.einsum("pd,pfd->pf", x_PD[:used], weight_eFD[expert_P])
    return (torch.cat([y_PF, y_PF.new_zeros(x_PD.shape[0] - used, weight_eFD.shape[1])]),)


def grouped_linear_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, counts: Sequence[int], *, past: int = 0, widths: tuple[int, int]) -> Case:
        d, f = widths
        x = Arg("x", normal(random, sum(counts) + past, d))
        weight = Arg("weight", normal(random, len(counts), f, d), Role.WEIGHT)
        args = (x, weight, Arg("counts", torch.tensor(counts), Role.PLAIN))
        return Case(name, args, past=past, widths=widths)

    for name, counts in COUNTS:
        yield case(name, counts, widths=(16, 8))
        yield case(f"{name}, rows past them", counts, past=NUM_PAST, widths=(16, 8))
    yield case("odd widths", (2, 0, 3), widths=(7, 5))
    yield case("one expert", (5,), widths=(8, 8))
    yield case("wide", (40, 0, 24), widths=(256, 128))
    yield from case("views", (4, 5), widths=(16, 8)).laid_out()
