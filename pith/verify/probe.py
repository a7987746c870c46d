"""What passes between the stages of layers, recorded by sequence, forward and backward.

A probe wraps methods of one rank's stages from outside, for one step. The whole batch in one piece
and every rank of a layout are probed alike, so that their records can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from pith.layer.protocol import Carry, Context, Layer, Routed, Stage

# What is recorded of a layer, in the order of the forward pass, and who has computed it.
ENTERS = "hidden states that enter"
RESIDUAL = "attend: residual"
TOKENS = "attend: tokens"
IDS = "attend: expert ids"
WEIGHTS = "attend: expert weights"
SUMMED = "combine: sums of the experts"
HIDDEN = "aggregate: hidden states"
LAYER_PLACES = (ENTERS, RESIDUAL, TOKENS, IDS, WEIGHTS, SUMMED, HIDDEN)
EMBED = "embed: hidden states"
HEAD = "head: hidden states that enter"

Place = tuple[int | None, str]  # layer, None outside of layers, and what
Records = dict[Place, dict[int, Tensor]]  # of each sequence of the global batch, flat


@dataclass(slots=True)
class Probe:
    """Records of one step. `rows` are the sequences that pass now."""

    rows: range
    values: Records = field(default_factory=dict)
    grads: Records = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)  # first, last + 1 -> sum
    _rows_of: dict[int, range] = field(default_factory=dict)

    def attach(self, stage: Stage) -> None:
        """Record what `stage` computes from now on."""
        if stage.is_first:
            wrap(stage, "embed", self._embed)
        for number, layer in stage.layers.items():
            self._attach_layer(layer, int(number))  # type: ignore[arg-type]
        if stage.is_last:
            wrap(stage, "logits", self._logits)
            wrap(stage, "loss", self._loss)

    def know(self, rows: range, *parts: object) -> None:
        """From now on each of `parts` of a micro-batch tells of these sequences."""
        self._rows_of |= {id(part): rows for part in parts}

    def _attach_layer(self, layer: Layer, number: int) -> None:
        def attend(original: Callable[..., Routed], carry: Carry, context: Context) -> Routed:
            self._now(context)
            self._record((number, ENTERS), carry.hidden_BSD)
            routed = original(carry, context)
            self._record((number, RESIDUAL), routed.residual.hidden_BSD)
            self._record((number, TOKENS), routed.tokens_TD)
            if routed.ids_TK is not None and routed.weights_TK is not None:
                self._record((number, IDS), routed.ids_TK)
                self._record((number, WEIGHTS), routed.weights_TK)
            return routed

        def aggregate(original: Callable[..., Carry], summed_TD: Tensor, residual: Carry) -> Carry:
            self._record((number, SUMMED), summed_TD)
            carry = original(summed_TD, residual)
            self._record((number, HIDDEN), carry.hidden_BSD)
            return carry

        wrap(layer, "attend", attend)
        wrap(layer, "aggregate", aggregate)

    def _embed(self, original: Callable[..., Carry], tokens_BS: Tensor) -> Carry:
        self._now(tokens_BS)
        carry = original(tokens_BS)
        self._record((None, EMBED), carry.hidden_BSD)
        return carry

    def _logits(self, original: Callable[..., Tensor], carry: Carry) -> Tensor:
        self._record((None, HEAD), carry.hidden_BSD)
        return original(carry)

    def _loss(self, original: Callable[..., Tensor], carry: Carry, labels_BS: Tensor) -> Tensor:
        self._now(labels_BS)
        loss = original(carry, labels_BS)
        self.losses[self.rows.start, self.rows.stop] = float(loss.detach())
        return loss

    def _now(self, part: object) -> None:
        self.rows = self._rows_of.get(id(part), self.rows)

    def _record(self, place: Place, tensor: Tensor) -> None:
        """Keep `tensor`, and its gradient once a backward pass comes to it."""
        rows = self.rows
        _keep(self.values, place, rows, tensor)
        if tensor.requires_grad:
            keep = partial(_keep, self.grads, place, rows)
            tensor.register_hook(keep)  # type: ignore[no-untyped-call]


def _keep(records: Records, place: Place, rows: range, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(len(rows), -1).to("cpu", copy=True)
    records.setdefault(place, {}).update(zip(rows, flat, strict=True))


def wrap(owner: object, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(original, ...)` in the place of a method of this one object."""
    original = getattr(owner, name)
    setattr(owner, name, partial(wrapper, original))
