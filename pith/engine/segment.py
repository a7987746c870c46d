"""Uniform segments: pieces of a chunk with a small autograd graph of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pith.comm.exchange import Route

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class Segment:
    """One executed segment: the detached leaves it read, the outputs that own its graph."""

    leaves: Tensors
    outputs: Tensors

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of the outputs -> gradients of the leaves, None where there is none."""
        pairs = [
            (output, grad)
            for output, grad in zip(self.outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return tuple(leaf.grad for leaf in self.leaves)


@dataclass(slots=True)
class Tape:
    """The executed segments of one chunk and micro-batch, last one on top.

    Without `recording` (evaluation) segments run without grad mode and leave nothing behind.
    """

    recording: bool
    segments: list[Segment] = field(default_factory=list)
    routes: list[Route | None] = field(default_factory=list)  # of the layers so far

    def run(self, function: Function, *inputs: Tensor) -> Tensors:
        """Run one segment on detached inputs; returns detached outputs."""
        if not self.recording:
            with torch.no_grad():
                return function(*inputs)
        leaves = tuple(_leaf(tensor) for tensor in inputs)
        with torch.enable_grad():
            outputs = function(*leaves)
        self.segments.append(Segment(leaves, outputs))
        return tuple(output.detach() for output in outputs)

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Backward of the segment on top, which is released."""
        return self.segments.pop().backward(grads)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
