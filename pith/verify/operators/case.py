"""One call of an operator: what goes in, how it lies in memory, and what must come out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pith.ops.pairs import Pairs
from pith.ops.precision import wide

EDGE_ROWS = (0, 1, 127, 128, 129)  # around the block of a kernel
FLOATS = (torch.float64, torch.float32, torch.bfloat16)

Layout = Literal["whole", "rows", "columns", "expanded"]


class Role(Enum):
    """What an argument is to an operator."""

    LEAF = "a tensor in the tested type with a gradient"
    WEIGHT = "the same, and a sink may take its gradient"
    WIDE_LEAF = "a tensor in float32 or wider with a gradient"
    WIDE = "a tensor in float32 or wider without one"
    PLAIN = "anything else"


WITH_GRADIENT = (Role.LEAF, Role.WEIGHT, Role.WIDE_LEAF)


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument by name. A floating tensor is float64 on the CPU here."""

    name: str
    value: Any
    role: Role = Role.LEAF


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call, in order, and keywords.

    `layout` is that of every tensor but weights: whole, rows of a wider tensor, every second
    column of one, or the first row over and over. `expanded_grad`: the gradient that comes in is
    one number for all elements, as after a sum. The last `past` rows of the first argument and of
    the incoming gradient hold NaN for the operator. An error is measured against `scale` where the
    exact tensor is smaller. `widths` are those that a kernel must take.
    """

    name: str
    args: tuple[Arg, ...]
    keywords: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    layout: Layout = "whole"
    expanded_grad: bool = False
    past: int = 0
    scale: float = 0.0
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        shapes = (f"{a.name} {list(a.value.shape)}" for a in self.args if torch.is_tensor(a.value))
        return ", ".join((self.name, *shapes))

    def laid_out(self) -> "Iterator[Case]":
        """This case as rows of a wider tensor, as columns, and with the first row repeated."""
        for layout in ("rows", "columns", "expanded"):
            name = f"{self.name}, {layout}, expanded gradient"
            yield replace(self, name=name, layout=layout, expanded_grad=True)

    def inputs(self, dtype: torch.dtype, device: str) -> list[Any]:
        """The arguments as the operator gets them."""
        return [self._input(arg, dtype, device) for arg in self.args]

    def _input(self, arg: Arg, dtype: torch.dtype, device: str) -> Any:
        if not torch.is_tensor(arg.value):
            return _pairs_to(arg.value, device) if isinstance(arg.value, Pairs) else arg.value
        value = arg.value.detach().to(device)
        if arg.role is not Role.PLAIN:
            value = value.to(dtype if arg.role in (Role.LEAF, Role.WEIGHT) else wide(dtype))
        if arg.role is Role.WEIGHT:
            return nn.Parameter(value.contiguous())
        value = _lay(value, self.layout)
        if self.past and arg is self.args[0]:
            value = with_rubbish(value, self.past)
        return value.requires_grad_(arg.role in WITH_GRADIENT)

    def exact_inputs(self, dtype: torch.dtype) -> list[Any]:
        """The same values in float64 on the CPU, without rubbish."""
        clean = replace(self, past=0).inputs(dtype, "cpu")
        return [_exact(value) if torch.is_tensor(value) else value for value in clean]

    def with_gradient(self, values: Sequence[Any]) -> dict[str, Tensor]:
        """Those of `values`, arguments in order, whose gradients are compared."""
        pairs = zip(self.args, values, strict=True)
        return {arg.name: value for arg, value in pairs if arg.role in WITH_GRADIENT}

    @property
    def weight(self) -> str:
        """The argument whose gradient a sink may take; "" where there is none."""
        return next((arg.name for arg in self.args if arg.role is Role.WEIGHT), "")


@dataclass(frozen=True, slots=True)
class Definition:
    """What an operator computes, written another way than any of its implementations.

    `oracle` takes its arguments in float64 on the CPU and returns every output, a tuple; gradients
    are autograd's. `outputs` names them; `wide`: they are float32 or wider for every input.
    """

    oracle: Callable[..., tuple[Tensor, ...]]
    cases: Callable[[], Iterator[Case]]
    outputs: tuple[str, ...] = ("output",)
    wide: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def dtype(self, tested: torch.dtype) -> torch.dtype:
        """The type of the floating outputs."""
        return wide(tested) if self.wide else tested


def generator() -> torch.Generator:
    """The numbers of one operator's cases: the same every time."""
    return torch.Generator().manual_seed(0)


def normal(random: torch.Generator, *shape: int) -> Tensor:
    """N(0, 1) in float64."""
    return torch.randn(shape, generator=random, dtype=torch.float64)


def with_rubbish(rows: Tensor, num_rows: int) -> Tensor:
    """`rows` with NaN in the last `num_rows`."""
    rows = rows.clone()
    rows[rows.shape[0] - num_rows :] = float("nan")
    return rows


def _lay(value: Tensor, layout: Layout) -> Tensor:
    """The same values, NaN or zero in between; with "expanded" the first row instead of each."""
    if value.ndim == 0 or layout == "whole":
        return value
    if layout == "expanded":
        return value[:1].expand_as(value) if value.is_floating_point() else value
    width = value.shape[-1]
    filling = float("nan") if value.is_floating_point() else 0
    wider = value.new_full((*value.shape[:-1], 2 * width), filling)
    view = wider[..., :width] if layout == "rows" else wider[..., ::2]
    view.copy_(value)
    return view


def _exact(value: Tensor) -> Tensor:
    exact = value.detach().contiguous()
    return (
        exact.double().requires_grad_(value.requires_grad) if exact.is_floating_point() else exact
    )


def _pairs_to(pairs: Pairs, device: str) -> Pairs:
    return Pairs(
        row_P=pairs.row_P.to(device),
        pair_P=pairs.pair_P.to(device),
        position_RK=pairs.position_RK.to(device),
        counts_e=pairs.counts_e.to(device),
    )
