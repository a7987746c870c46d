"""Replaces what routers choose for a whole step: recorded choices, or evenly spread ones.

Shape letters: N sequences of the global batch of S tokens, T tokens of a micro-batch, K top-k.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pith.layer.protocol import Routing

UNSEEN = -1  # in place of an expert that nobody recorded


class StepRouting(Protocol):
    """Routing of one step, cut by micro-batch."""

    @property
    def name(self) -> str:
        """How a run reports it: "recorded", "replayed" or "balanced"."""
        ...

    def at(self, rows: slice) -> Routing:
        """For the micro-batch that holds the sequences start to stop of the global batch."""
        ...


@dataclass(frozen=True, slots=True)
class _Rows:
    choose_in: Callable[[slice, int, Tensor], Tensor]
    rows: slice

    def choose(self, layer: int, ids_TK: Tensor) -> Tensor:
        return self.choose_in(self.rows, layer, ids_TK)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Leaves choices as they are and keeps them on the host."""

    name: ClassVar[str] = "recorded"
    num_sequences: int
    length: int = field(kw_only=True)  # tokens of a sequence
    choices: dict[int, Tensor] = field(default_factory=dict, init=False)  # layer -> [N, S, K]

    def at(self, rows: slice) -> Routing:
        """Keep what the routers choose for these rows; others stay at -1."""
        return _Rows(self._keep, rows)

    def _keep(self, rows: slice, layer: int, ids_TK: Tensor) -> Tensor:
        each = (self.length, ids_TK.shape[1])
        if layer not in self.choices:
            self.choices[layer] = torch.full((self.num_sequences, *each), UNSEEN)
        self.choices[layer][rows] = ids_TK.view(rows.stop - rows.start, *each).cpu()
        return ids_TK


def merge(recorded: Iterable[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Join the choices that several ranks recorded of one step: other layers, other rows.

    What two of them saw must be the same.
    """
    merged: dict[int, Tensor] = {}
    for choices in recorded:
        for layer, ids_NSK in choices.items():
            known_NSK = merged.get(layer, torch.full_like(ids_NSK, UNSEEN))
            same = (known_NSK == ids_NSK) | (known_NSK == UNSEEN) | (ids_NSK == UNSEEN)
            assert same.all(), f"layer {layer}: two recordings of one token differ"
            merged[layer] = torch.maximum(known_NSK, ids_NSK)
    return merged


@dataclass(frozen=True, slots=True)
class Replay:
    """Sends tokens to recorded experts."""

    name: ClassVar[str] = "replayed"
    choices: Mapping[int, Tensor]  # layer -> [N, S, K] int64

    def at(self, rows: slice) -> Routing:
        """What was recorded of these rows. A step of other sizes is an assertion."""
        return _Rows(self._replay, rows)

    def _replay(self, rows: slice, layer: int, ids_TK: Tensor) -> Tensor:
        where = f"replayed layer {layer}, sequences {rows.start} to {rows.stop}"
        assert layer in self.choices, f"{where}: only layers {sorted(self.choices)} were recorded"
        chosen_TK = self.choices[layer][rows].flatten(0, 1)
        found, wanted = tuple(chosen_TK.shape), tuple(ids_TK.shape)
        assert found == wanted, f"{where}: choices {found} were recorded, {wanted} are asked for"
        assert (chosen_TK != UNSEEN).all(), f"{where}: some choices were not recorded"
        return _beside(ids_TK, chosen_TK)


@dataclass(frozen=True, slots=True)
class Balanced:
    """Sends equally many pairs to every expert, whatever a token says. For benchmarks.

    Pair t * K + k of the global batch goes to the expert at that place, modulo E, of a fixed order
    in which neighbours lie far apart.
    """

    name: ClassVar[str] = "balanced"
    num_experts: int

    def at(self, rows: slice) -> Routing:
        """Choices that depend on the place of a token alone."""
        return _Rows(self._spread, rows)

    def _spread(self, rows: slice, layer: int, ids_TK: Tensor) -> Tensor:
        num_pairs, device = ids_TK.numel(), ids_TK.device
        first = rows.start * num_pairs // (rows.stop - rows.start)
        pairs_TK = torch.arange(first, first + num_pairs, device=device).view_as(ids_TK)
        order_E = _beside(ids_TK, torch.tensor(far_apart(self.num_experts)))
        return order_E[pairs_TK % self.num_experts]


def far_apart(num_experts: int) -> list[int]:
    """All experts, so ordered that neighbours take turns among the ranks that share them out.

    The digits of a place, in the prime factors of E, are read backwards. Any run of places, also
    round the end, falls evenly to one pair on 2 blocks of experts, on 4, and so on through the
    factors from the smallest.
    """
    factors = (n for n in range(2, num_experts) if num_experts % n == 0)
    block = num_experts // next(factors, num_experts)
    if block == 1:
        return list(range(num_experts))
    return [start + e for e in far_apart(block) for start in range(0, num_experts, block)]


def _beside(ids_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    # A copy that blocks would wait for the device to finish all that it has been given.
    return chosen_TK.to(ids_TK.device, non_blocking=True)
