"""rms_norm, swiglu, rope: formulas of a row or of an element."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.verify.operators.case import EDGE_ROWS, Arg, Case, Role, generator, normal


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    """Each row over its root mean square."""
    square = torch.einsum("...d,...d->...", x, x) / x.shape[-1]
    return (torch.einsum("...d,...,d->...d", x, (square + eps) ** -0.5, weight),)


def rms_norm_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, x: Tensor) -> Case:
        weight = Arg("weight", normal(random, x.shape[-1]))
        return Case(name, (Arg("x", x), weight, Arg("eps", 1e-3, Role.PLAIN)))

    for rows in EDGE_ROWS:
        yield case(f"{rows} rows", normal(random, rows, 32))
    yield case("a row of zeros", torch.cat([torch.zeros(1, 16), normal(random, 2, 16)]).double())
    yield case("rows no larger than eps", 0.03 * normal(random, 5, 64))
    yield case("heads", normal(random, 2, 5, 3, 128))
    yield case("odd width", normal(random, 5, 37))
    yield from case("views", normal(random, 9, 32)).laid_out()


def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    """gate * sigmoid(gate) * up by exponentials."""
    return (gate / (1 + (-gate).exp()) * up,)


def swiglu_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, *shape: int, scale: float = 1.0) -> Case:
        values = (scale * normal(random, *shape) for _ in range(2))
        return Case(name, tuple(map(Arg, ("gate", "up"), values)))

    for rows in EDGE_ROWS:
        yield case(f"{rows} rows", rows, 24)
    yield case("odd width", 5, 37)
    yield case("large values", 16, 16, scale=30.0)
    yield from case("views", 9, 16).laid_out()


def rope(x_BSHd: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> tuple[Tensor]:
    """Channels i and i + d/2 as one complex number, turned."""
    half = x_BSHd.shape[-1] // 2
    numbers = torch.complex(x_BSHd[..., :half], x_BSHd[..., half:])
    turn = torch.complex(cos_BSd[..., :half], sin_BSd[..., :half]).unsqueeze(2)
    turned = numbers * turn
    return (torch.cat((turned.real, turned.imag), dim=-1),)


def rope_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, *shape: int, batch: int = 1) -> Case:
        angles = 3 * normal(random, batch, shape[1], shape[3] // 2).repeat(1, 1, 2)
        turns = Arg("cos", angles.cos(), Role.WIDE), Arg("sin", angles.sin(), Role.WIDE)
        return Case(name, (Arg("x", normal(random, *shape)), *turns))

    for rows in EDGE_ROWS:
        yield case(f"{rows} positions", 2, rows, 3, 8)
    yield case("head width 2", 1, 5, 1, 2)
    yield case("odd half", 1, 5, 3, 6)
    yield case("head width 128", 1, 9, 2, 128)
    yield case("positions of each sequence", 3, 5, 2, 8, batch=3)
    yield from case("views", 2, 9, 3, 8).laid_out()
