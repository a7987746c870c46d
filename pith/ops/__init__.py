"""Operators: functions of tensors that know no rank, no group and no config.

Importing this imports no torch. Each operator is a folder; `reference` is its definition, written
to be read; the others serve one kind of machine faster. `choose` picks one of each.

Shape letters: B batch, S sequence, T tokens, D hidden, H heads, G key-value heads, d head width,
K top-k, E experts, e local experts, R received rows, P (row, slot) pairs, F output width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from pith.errors import Fault, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from pith.ops.pairs import Pairs

REFERENCE = "reference"
LIBRARY = "library"

_LIBRARY_ON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {  # operator -> device types where its library kernel is the default
        "rms_norm": ("cuda",),
        "attention": ("cpu", "cuda"),
        "linear": ("cuda",),
        "grouped_linear": ("cuda",),
    }
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides whether a library kernel serves it."""

    item_bytes: int  # of an element in the compute type
    expert_widths: tuple[int, ...] = ()  # D and F of the experts' products

    def fit(self, operator: str) -> bool:
        """Whether the library kernel of `operator` takes these sizes.

        The grouped product takes no float64, and rows of whole 16 bytes only.
        """
        if operator != "grouped_linear":
            return True
        rows = (width * self.item_bytes for width in self.expert_widths)
        return self.item_bytes <= 4 and all(row % 16 == 0 for row in rows)


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of every operator. Signatures are those of the reference functions."""

    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    embedding: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    topk_route: Callable[..., tuple[Tensor, Tensor, Tensor]]
    sort_pairs: Callable[..., Pairs]
    gather_rows: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    weighted_sum: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]

    def names(self) -> dict[str, str]:
        """Operator -> the name of its implementation."""
        return {
            operator: getattr(self, operator).__module__.rpartition(".")[2]
            for operator in operator_names()
        }


def operator_names() -> tuple[str, ...]:
    """All operators, in the order of the data flow."""
    return tuple(field.name for field in fields(Operators))


def implementations(operator: str) -> tuple[str, ...]:
    """The implementations of one operator."""
    return (REFERENCE, LIBRARY) if operator in _LIBRARY_ON else (REFERENCE,)


def choose(
    device_type: str,
    overrides: Mapping[str, str] = MappingProxyType({}),
    sizes: Sizes | None = None,
) -> Operators:
    """The operators for "cpu" or "cuda"; `overrides` names implementations by operator.

    A library kernel that does not serve `sizes` is not taken. Raises RequestError listing every
    unknown operator or implementation, or one that does not serve, with the valid names.
    """
    faults = examine(overrides, sizes)
    if faults:
        raise RequestError(
            "operators.unknown",
            what="unknown operator choice: " + "; ".join(str(fault) for fault in faults),
            next_step="choose among the named implementations",
            faults=faults,
        )
    defaults = {name: _default(name, device_type, sizes) for name in operator_names()}
    chosen = defaults | dict(overrides)
    return Operators(
        **{
            operator: getattr(import_module(f"pith.ops.{operator}.{name}"), operator)
            for operator, name in chosen.items()
        }
    )


def examine(overrides: Mapping[str, str], sizes: Sizes | None = None) -> tuple[Fault, ...]:
    """What is wrong with implementations chosen by operator name."""
    return tuple(fault for item in overrides.items() for fault in _faults(*item, sizes))


def _default(operator: str, device_type: str, sizes: Sizes | None) -> str:
    fits = sizes is None or sizes.fit(operator)
    return LIBRARY if fits and device_type in _LIBRARY_ON.get(operator, ()) else REFERENCE


def _faults(operator: str, implementation: str, sizes: Sizes | None) -> tuple[Fault, ...]:
    if operator not in operator_names():
        return (Fault("operators", repr(operator), "an operator", operator_names()),)
    valid = implementations(operator)
    if implementation not in valid:
        return (Fault(f"operators.{operator}", repr(implementation), "its implementation", valid),)
    if implementation == LIBRARY and sizes is not None and not sizes.fit(operator):
        wanted = "reference: this kernel takes no float64, and widths of whole 16 bytes only"
        return (Fault(f"operators.{operator}", repr(implementation), wanted, (REFERENCE,)),)
    return ()
