"""The layers of a family as the engine needs them.

Five stages that compose to the layer, gradients that can be sent back by hand, weight gradients
that wait in a sink.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pith.arch import Architecture
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Carry, Context, Layer
from pith.report import Check
from pith.verify import whole_model
from pith.verify.subject import Subject, distance, some, source_of

SAME_SUMS = 1e-12  # between two ways through pith in float64


def check_stages(subject: Subject) -> Iterator[Check]:
    """Every check of the five stages, layer by layer."""
    architecture = subject.architecture
    stage = whole_model.build_whole(architecture, torch.float64)
    tokens_BS, _ = whole_model.make_batch(architecture.vocab_size)
    context = whole_model.make_context(stage, whole_model.LOSSES)
    carry = stage.embed(tokens_BS)
    faults: dict[str, list[str]] = {"speech": [], "stages": [], "by hand": []}
    where = ""
    for number, layer in whole_model.layers_of(stage):
        where = source_of(layer)
        whole = _whole(layer, carry, context)
        faults["speech"] += _silent_faults(architecture, number, layer, carry, context)
        composed = _composed(layer, carry, context)
        if not all(torch.equal(a, b) for a, b in zip(composed, whole, strict=True)):
            faults["stages"].append(f"layer {number} differs")
        returned = _by_hand(layer, carry, context)
        far = max(distance(a, b) for a, b in zip(returned, whole, strict=True))
        if not far <= SAME_SUMS:
            faults["by hand"].append(f"layer {number} is {far:.1e} apart")
        carry = Carry.of(tuple(whole[: len(carry.tensors())]))
    promises = {
        "speech": ("what a layer says it sends", "as is_moe and carry_shapes say"),
        "stages": ("five stages composed", "Layer.forward bit for bit, gradients too"),
        "by hand": ("gradients sent back by hand", f"autograd's within {SAME_SUMS:g}"),
    }
    for kind, (promise, wanted) in promises.items():
        found = some(faults[kind]) or f"{architecture.num_layers} layers"
        yield subject.check(promise, not faults[kind], found=found, wanted=wanted, where=where)


def check_sink(subject: Subject) -> Iterator[Check]:
    """Every gradient reaches the engine's sink, and is autograd's."""
    architecture, sink = subject.architecture, WeightGrads()
    batch = whole_model.make_batch(architecture.vocab_size)
    plain = whole_model.build_whole(architecture, torch.float64)
    whole_model.backward(plain, batch, whole_model.LOSSES)
    stage = whole_model.build_whole(architecture, torch.float64, sink=sink)
    whole_model.backward(stage, batch, whole_model.LOSSES)
    sink.run_fresh()

    faults = []
    for name, parameter in stage.named_parameters():
        reference = plain.get_parameter(name).grad
        wanted = torch.zeros_like(parameter) if reference is None else reference
        far = distance(sink.main_grad(parameter), wanted)
        if parameter.grad is not None:
            faults.append(f"{name} goes to autograd")
        elif not far <= SAME_SUMS:
            faults.append(f"{name} is {far:.1e} apart")
    yield subject.check(
        "gradients in the sink",
        not faults,
        found=some(faults) or f"{len(architecture.parameters())} tensors",
        wanted=f"all, autograd's within {SAME_SUMS:g}: a parameter is tapped or its product defers",
        where=source_of(stage),
    )


def _silent_faults(
    architecture: Architecture, number: int, layer: Layer, carry: Carry, context: Context
) -> Iterator[str]:
    """Where a layer says other than it does."""
    routed = layer.attend(carry, context)
    is_moe = architecture.is_moe(number)
    if layer.communicates != is_moe:
        yield f"layer {number} communicates: {layer.communicates}, is_moe: {is_moe}"
    if (routed.ids_TK is not None) != is_moe:
        yield f"layer {number} routes: {not is_moe}, is_moe: {is_moe}"
    shapes = tuple(tuple(x.shape) for x in routed.residual.tensors())
    wanted = architecture.carry_shapes(*carry.hidden_BSD.shape[:2])
    if shapes != wanted:
        yield f"layer {number} carries {shapes}, carry_shapes says {wanted}"


def _whole(layer: Layer, carry: Carry, context: Context) -> list[Tensor]:
    """What leaves the layer, and the gradients of its input and its weights."""
    start = _leaves(layer, carry)
    return _finish(layer, start, layer.forward(start, context))


def _composed(layer: Layer, carry: Carry, context: Context) -> list[Tensor]:
    """The same by the five stages in order."""
    start = _leaves(layer, carry)
    routed = layer.attend(start, context)
    received = layer.dispatch(routed).wait()
    combine = layer.combine(layer.experts(received), received.route)
    return _finish(layer, start, layer.aggregate(combine.wait(), routed.residual))


def _by_hand(layer: Layer, carry: Carry, context: Context) -> list[Tensor]:
    """The same with every message cut out of autograd's graph, as the engine does."""
    start = _leaves(layer, carry)
    routed = layer.attend(start, context)
    with torch.no_grad():
        received = layer.dispatch(routed).wait()
    tokens_RD = _leaf(received.tokens_RD)
    weights_RK = None if received.weights_RK is None else _leaf(received.weights_RK)
    partial_RD = layer.experts(replace(received, tokens_RD=tokens_RD, weights_RK=weights_RK))
    with torch.no_grad():
        summed_TD = layer.combine(partial_RD.detach(), received.route).wait()
    summed_TD = _leaf(summed_TD)
    residual = Carry.of(tuple(map(_leaf, routed.residual.tensors())))
    out = layer.aggregate(summed_TD, residual)
    _objective(out).backward()  # type: ignore[no-untyped-call]

    grad_RD = layer.combine_backward(_grad(summed_TD), received.route).wait()
    partial_RD.backward(grad_RD)  # type: ignore[no-untyped-call]
    weights_grad_RK = None if weights_RK is None else _grad(weights_RK)
    tokens_grad_TD, weights_grad_TK = layer.dispatch_backward(
        _grad(tokens_RD), weights_grad_RK, received.route
    ).wait()
    outputs = [routed.tokens_TD, *routed.residual.tensors()]
    grads = [tokens_grad_TD, *map(_grad, residual.tensors())]
    if routed.weights_TK is not None and weights_grad_TK is not None:
        outputs.append(routed.weights_TK)
        grads.append(weights_grad_TK)
    torch.autograd.backward(outputs, grads)
    return _results(layer, start, out)


def _finish(layer: Layer, start: Carry, out: Carry) -> list[Tensor]:
    _objective(out).backward()  # type: ignore[no-untyped-call]
    return _results(layer, start, out)


def _objective(out: Carry) -> Tensor:
    """A scalar in which every element of what leaves a layer counts."""
    return torch.stack([x.square().sum() for x in out.tensors()]).sum()


def _results(layer: Layer, start: Carry, out: Carry) -> list[Tensor]:
    parameters = whole_model.as_module(layer).parameters()
    return [
        *(x.detach() for x in out.tensors()),
        *map(_grad, start.tensors()),
        *map(_grad, parameters),
    ]


def _leaves(layer: Layer, carry: Carry) -> Carry:
    """The input of a layer as leaves, no gradient left of an earlier pass."""
    whole_model.as_module(layer).zero_grad()
    return Carry.of(tuple(map(_leaf, carry.tensors())))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
