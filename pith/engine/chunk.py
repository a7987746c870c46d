"""Forward and backward of one chunk, as generators that yield after each communication launch.

A chunk is the work of one stage for one micro-batch, cut at expert communication:

    enter + attend(0) | experts(0) | aggregate(0) + attend(1) | ... | aggregate(L-1) + leave

`enter` is the embedding on the first stage, `leave` the head and the loss on the last. Draining a
generator runs the chunk alone; alternating two overlaps them. There is no third way.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from pith.engine.segment import Tape, Tensors
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Carry, Context, Layer, Received, Routed, Stage


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a chunk reads besides the carry."""

    tokens_BS: Tensor  # [B, S] int64
    labels_BS: Tensor  # [B, S] int64, -100 is not counted
    context: Context


Forward = Generator[None, None, Tensors]
Backward = Generator[None, None, Tensors]


def forward_chunk(stage: Stage, batch: MicroBatch, carry: Tensors, tape: Tape) -> Forward:
    """Run a chunk forward.

    `carry` holds the tensors from the stage before, and is empty on the first stage. Returns the
    carry for the stage after, or the scalar loss sum on the last stage.
    """
    layers = _layers(stage)
    if not layers:
        return tape.run(lambda *c: _leave(stage, _enter(stage, batch, c), batch), *carry)
    routed = _attend(
        tape, lambda *c: layers[0].attend(_enter(stage, batch, c), batch.context), *carry
    )
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        dispatch = layer.dispatch(routed)
        if layer.communicates:
            yield
        received = dispatch.wait()
        tape.routes.append(received.route)
        combine = layer.combine(_experts(tape, layer, received), received.route)
        if layer.communicates:
            yield
        inputs = (combine.wait(), *routed.residual.tensors())
        if following is None:
            return tape.run(_aggregate_leave(stage, layer, batch), *inputs)
        routed = _attend(tape, _aggregate_attend(layer, following, batch), *inputs)
    raise AssertionError("unreachable: the last layer returns")


def backward_chunk(
    stage: Stage, tape: Tape, grads: Tensors, *, weights: WeightGrads, split: tuple[int, int] | None
) -> Backward:
    """Run a chunk backward: gradients of its outputs -> gradients of the carry it received.

    Weight gradients run right after the launch that follows their segment, under communication
    in flight; with `split` = (stage, micro-batch) they are kept for that W slot instead.
    """

    def weight_gradients() -> None:
        if split is None:
            weights.run_fresh()
        else:
            weights.store_fresh(*split)

    received = tape.segments[0].leaves
    flowing = tape.backward(grads)
    for layer in reversed(_layers(stage)):
        summed, *residual = flowing
        route = tape.routes.pop()
        combine = layer.combine_backward(_present(summed), route)
        weight_gradients()
        if layer.communicates:
            yield
        tokens, *routing = tape.backward((combine.wait(),))
        dispatch = layer.dispatch_backward(_present(tokens), routing[0] if routing else None, route)
        weight_gradients()
        if layer.communicates:
            yield
        tokens_grad, weights_grad = dispatch.wait()
        routed = (tokens_grad,) if weights_grad is None else (tokens_grad, weights_grad)
        flowing = tape.backward((*routed, *residual))
    weight_gradients()
    # Extras that no layer of the stage reads, and none after it, have a gradient of zero.
    return tuple(
        torch.zeros_like(leaf) if grad is None and index > 0 else _present(grad)
        for index, (leaf, grad) in enumerate(zip(received, flowing, strict=True))
    )


def alternate(leading: Backward, following: Forward) -> tuple[Tensors, Tensors]:
    """Advance two chunks in turn, the leading one first, until both have returned."""
    results: list[Tensors | None] = [None, None]
    works = (leading, following)
    while None in results:
        for index, work in enumerate(works):
            if results[index] is None:
                try:
                    next(work)
                except StopIteration as end:
                    results[index] = end.value
    return cast(Tensors, results[0]), cast(Tensors, results[1])


def drain(work: Generator[None, None, Tensors]) -> Tensors:
    """Run one chunk alone."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(Tensors, end.value)


def _layers(stage: Stage) -> list[Layer]:
    return [cast(Layer, layer) for layer in stage.layers.values()]


def _attend(tape: Tape, function: Callable[..., Routed], *inputs: Tensor) -> Routed:
    """Run a segment that ends in attend. Expert ids carry no gradient and bypass the tape."""
    ids: list[Tensor | None] = []

    def segment(*leaves: Tensor) -> Tensors:
        routed = function(*leaves)
        ids.append(routed.ids_TK)
        weights = () if routed.weights_TK is None else (routed.weights_TK,)
        return (routed.tokens_TD, *weights, *routed.residual.tensors())

    tokens, *rest = tape.run(segment, *inputs)
    weights = None if ids[-1] is None else rest.pop(0)
    return Routed(tokens, Carry.of(tuple(rest)), ids[-1], weights)


def _experts(tape: Tape, layer: Layer, received: Received) -> Tensor:
    """Run the experts' segment on what dispatch brought."""
    routing = () if received.weights_RK is None else (received.weights_RK,)

    def segment(tokens: Tensor, *weights: Tensor) -> Tensors:
        weights_RK = weights[0] if weights else None
        return (layer.experts(replace(received, tokens_RD=tokens, weights_RK=weights_RK)),)

    return tape.run(segment, received.tokens_RD, *routing)[0]


def _aggregate_attend(layer: Layer, following: Layer, batch: MicroBatch) -> Callable[..., Routed]:
    return lambda summed, *residual: following.attend(
        layer.aggregate(summed, Carry.of(residual)), batch.context
    )


def _aggregate_leave(stage: Stage, layer: Layer, batch: MicroBatch) -> Callable[..., Tensors]:
    return lambda summed, *residual: _leave(
        stage, layer.aggregate(summed, Carry.of(residual)), batch
    )


def _enter(stage: Stage, batch: MicroBatch, carry: Tensors) -> Carry:
    return stage.embed(batch.tokens_BS) if stage.is_first else Carry.of(carry)


def _leave(stage: Stage, carry: Carry, batch: MicroBatch) -> Tensors:
    return (stage.loss(carry, batch.labels_BS),) if stage.is_last else carry.tensors()


def _present(grad: Tensor | None) -> Tensor:
    assert grad is not None, "a gradient that the layer before needs was not computed"
    return grad
