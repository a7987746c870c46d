"""What ranks hold of tensors of the whole model, joined again, and how far it is from another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite

import torch
from torch import Tensor

from pith.engine.shard import Parameters
from pith.errors import RunFailedError

FACTOR_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of the first axis of each tensor, from row `first` of the whole one on.

    `counted` are the names whose rows this rank counts; of others it holds a copy.
    """

    tensors: Mapping[str, Tensor]
    first: Mapping[str, int]
    counted: frozenset[str]


def share(parameters: Parameters, tensors: Mapping[str, Tensor]) -> Share:
    """What this rank holds now, copied to the host."""
    held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return Share(held, dict(parameters.first_rows), parameters.counted)


def joined(shares: Sequence[Share]) -> dict[str, Tensor]:
    """The whole tensors. Raises RunFailedError where a row is counted by no rank or by two, or
    where two copies of one differ in a bit."""
    rows: dict[str, dict[int, Tensor]] = {}
    for held in shares:
        for name in held.counted:
            tensor, first = held.tensors[name], held.first[name]
            if len(tensor):
                if first in rows.setdefault(name, {}):
                    raise _torn(name, f"row {first} counted twice", "each row counted once")
                rows[name][first] = tensor
    whole = {name: _stacked(name, pieces) for name, pieces in rows.items()}
    for rank, held in enumerate(shares):
        for name, tensor in held.tensors.items():
            if not len(tensor):
                continue
            copy = whole[name][held.first[name] :][: len(tensor)] if name in whole else None
            if copy is None or not _same(copy, tensor):
                raise _torn(name, f"copies that differ, one of them on rank {rank}", "equal bits")
    return whole


def _same(copy: Tensor, tensor: Tensor) -> bool:
    """Whether all bits are equal, one NaN being as good as another."""
    return bool(((copy == tensor) | (copy.isnan() & tensor.isnan())).all())


def _stacked(name: str, pieces: Mapping[int, Tensor]) -> Tensor:
    starts = sorted(pieces)
    ends = [start + len(pieces[start]) for start in starts]
    if [0, *ends[:-1]] != starts:
        held = ", ".join(f"{a} to {b - 1}" for a, b in zip(starts, ends, strict=True))
        raise _torn(name, f"rows {held}", "every row once")
    return torch.cat([pieces[start] for start in starts])


def _torn(name: str, found: str, wanted: str) -> RunFailedError:
    return RunFailedError(
        "parity.shares",
        what=f"the ranks do not hold {name} as one tensor",
        found=found,
        wanted=wanted,
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a tensor is from the wanted one."""

    name: str
    relative: float  # ||found - wanted|| / ||wanted||; infinite for one that is missing
    note: str = ""  # what else is known of it
    factor: float | None = None  # where found is so many times wanted, and nothing else differs

    def text(self, sizes: Mapping[str, int]) -> str:
        """In words. `sizes` are numbers of ranks and the like that a factor may come from."""
        if self.note:
            return f"{self.name}: {self.note}"
        if self.factor is None:
            return f"{self.name}: relative {self.relative:.1e}"
        near = [
            text
            for name, size in sizes.items()
            for text, value in ((name, size), (f"1 / {name}", 1 / size))
            if size > 1 and abs(self.factor - value) <= FACTOR_TOLERANCE * value
        ]
        hint = f", which is {' or '.join(near)}" if near else ""
        return f"{self.name}: {self.factor:.6g} times what one process finds{hint}"


def gap(name: str, found: Tensor | None, wanted: Tensor) -> Gap:
    """How far `found` is from `wanted`; a tensor that should be zero is zero."""
    if found is None or found.shape != wanted.shape:
        shape = None if found is None else tuple(found.shape)
        note = f"shape {shape} instead of {tuple(wanted.shape)}" if shape else "missing"
        return Gap(name, inf, note)
    error, size = float((found - wanted).norm()), float(wanted.norm())
    if not isfinite(error):
        return Gap(name, inf, "not finite")
    if error == 0 or size == 0:
        return Gap(name, inf, "not zero, as in one process") if error else Gap(name, 0.0)
    factor = copysign(float(found.norm()) / size, float((found * wanted).sum()))
    if factor == 0:
        return Gap(name, 1.0, "zero")
    rest = float((found - factor * wanted).norm())
    is_clean = rest <= FACTOR_TOLERANCE * abs(factor) * size and abs(factor - 1) > FACTOR_TOLERANCE
    return Gap(name, error / size, factor=factor if is_clean else None)


def gaps(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[Gap, ...]:
    """The gap of each wanted tensor in their order, and one for each that nobody wants."""
    return (
        *(gap(name, found.get(name), tensor) for name, tensor in wanted.items()),
        *(Gap(name, inf, "unknown to one process") for name in found if name not in wanted),
    )
