"""Where a layout first differs from one process: by layer and stage, forward, then backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isclose

import torch
from torch import Tensor

from pith.verify.probe import (
    EMBED,
    HEAD,
    HIDDEN,
    IDS,
    LAYER_PLACES,
    RESIDUAL,
    SUMMED,
    TOKENS,
    WEIGHTS,
    Place,
    Probe,
    Records,
)

# A sequence of which next to nothing is left after a sum is compared with what all of them are.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Spot:
    """The first record that differs."""

    place: Place
    sequence: int
    rank: int | None  # that recorded it
    relative: float  # infinite where nothing was recorded

    def text(self) -> str:
        """In words."""
        layer, what = self.place
        place = what if layer is None else f"layer {layer}, {what}"
        rank = "" if self.rank is None else f" (rank {self.rank})"
        how = "not computed" if self.relative == inf else f"relative {self.relative:.1e}"
        return f"{place}, sequence {self.sequence}{rank}, {how}"


def first_forward(one: Probe, ranks: Sequence[Probe], *, tolerance: float) -> Spot | None:
    """The first place in model order whose values differ from those of `one` piece."""
    return _first(_places(one.values), one, ranks, backward=False, tolerance=tolerance)


def first_backward(one: Probe, ranks: Sequence[Probe], *, tolerance: float) -> Spot | None:
    """The first place in the order of the backward pass whose gradients differ."""
    places = _places(one.grads)[::-1]
    return _first(places, one, ranks, backward=True, tolerance=tolerance)


def came_from(place: Place) -> str:
    """What computes the gradient at `place`."""
    layer, what = place
    if what == HEAD:
        return "head and loss"
    if what == EMBED or (what == HIDDEN and layer is not None):
        return "the layer after"
    by = {SUMMED: "aggregate", TOKENS: "experts and their exchange", RESIDUAL: "attend"}
    by |= {WEIGHTS: by[TOKENS]}
    return by.get(what, "attend")


def loss_difference(
    losses_N: Sequence[float], ranks: Sequence[Probe], *, tolerance: float
) -> str | None:
    """The first micro-batch whose sum of token losses differs, though its hidden states do not."""
    for rank, probe in enumerate(ranks):
        for (start, stop), loss in sorted(probe.losses.items()):
            wanted = sum(losses_N[start:stop])
            if not isclose(loss, wanted, rel_tol=tolerance, abs_tol=0.0):
                return f"loss of sequences {start} to {stop - 1} (rank {rank}): {loss!r}"
    return None


def _places(records: Records) -> list[Place]:
    """The places that were recorded, in model order."""
    layers = sorted({layer for layer, _ in records if layer is not None})
    order: list[Place] = [(None, EMBED)]
    order += [(layer, what) for layer in layers for what in LAYER_PLACES]
    order.append((None, HEAD))
    return [place for place in order if place in records]


def _first(
    places: Sequence[Place],
    one: Probe,
    ranks: Sequence[Probe],
    *,
    backward: bool,
    tolerance: float,
) -> Spot | None:
    for place in places:
        wanted = (one.grads if backward else one.values)[place]
        whole = float(torch.cat([each.double() for each in wanted.values()]).norm())
        for sequence in sorted(wanted):
            rank, found = _found(ranks, place, sequence, backward=backward)
            relative = _relative(found, wanted[sequence], whole=whole, backward=backward)
            allowed = 0.0 if place[1] == IDS else tolerance
            if not relative <= allowed:
                return Spot(place, sequence, rank, relative)
    return None


def _found(
    ranks: Sequence[Probe], place: Place, sequence: int, *, backward: bool
) -> tuple[int | None, Tensor | None]:
    for rank, probe in enumerate(ranks):
        records = (probe.grads if backward else probe.values).get(place, {})
        if sequence in records:
            return rank, records[sequence]
    return None, None


def _relative(found: Tensor | None, wanted: Tensor, *, whole: float, backward: bool) -> float:
    """The error in parts of `wanted`; a gradient that never came is zero."""
    if found is None and backward:
        found = torch.zeros_like(wanted)
    if found is None or found.shape != wanted.shape:
        return inf
    error = float((found.double() - wanted.double()).norm())
    size = max(float(wanted.double().norm()), LEAST_SHARE * whole)
    return 0.0 if error == 0 else error / size if size > 0 else inf
