"""A family against transformers: the same weights and tokens give the same numbers."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from pith.arch import Architecture
from pith.layer.protocol import Stage
from pith.report import Check
from pith.verify import transformers_model, whole_model
from pith.verify.subject import Subject, distance, some, source_of

# ||found - wanted|| <= tolerance * ||wanted||, per tensor.
TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-10, torch.float32: 1e-5}
)
FLOPS_TOLERANCE = 1e-9  # of a sum of whole numbers in float64


def check_parity(subject: Subject) -> Iterator[Check]:
    """Logits, loss and every gradient, in each type, and the FLOPs that they took."""
    architecture = subject.architecture
    batch = whole_model.make_batch(architecture.vocab_size)
    for dtype, tolerance in TOLERANCES.items():
        stage = whole_model.build_whole(architecture, dtype)
        weights = whole_model.to_hub(architecture, whole_model.weights(stage, architecture))
        counts_flops = dtype is torch.float32
        wanted = transformers_model.run(subject.config, weights, *batch, counts_flops=counts_flops)
        logits_BSV, loss = whole_model.backward(stage, batch)

        kind = str(dtype).removeprefix("torch.")
        limit = f"transformers' within {tolerance:g}"
        far = distance(logits_BSV, wanted.logits_BSV)
        same = far <= tolerance
        told, where = ("", source_of(stage)) if same else _trail(stage, batch[0], wanted, tolerance)
        found = f"{far:.1e} apart{told}"
        yield subject.check(f"logits, {kind}", same, found=found, wanted=limit, where=where)
        far = distance(loss, wanted.loss)
        yield subject.check(
            f"loss, {kind}",
            far <= tolerance,
            found=f"{far:.1e} apart",
            wanted=limit,
            where=f"{source_of(stage)} loss",
        )
        yield _gradients(subject, stage, wanted.grads, dtype, is_forward_equal=same)
        if wanted.flops is not None:
            yield _flops(subject, wanted.flops / batch[0].numel())


def _gradients(
    subject: Subject,
    stage: Stage,
    saved: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    is_forward_equal: bool,
) -> Check:
    """Every canonical gradient; of those that differ the nearest to the loss is named first."""
    tolerance, architecture = TOLERANCES[dtype], subject.architecture
    found = whole_model.gradients(stage, architecture)
    apart = {
        spec.name: distance(found[spec.name], _from_hub(architecture, spec.name, saved))
        for spec in architecture.parameters()
    }
    faults = [name for name, far in apart.items() if not far <= tolerance]
    if is_forward_equal:
        faults.reverse()  # a wrong backward spoils what comes after it, which is what lies below
    told = [f"{name} {apart[name]:.1e} apart" for name in faults]
    return subject.check(
        f"every gradient, {str(dtype).removeprefix('torch.')}",
        not faults,
        found=f"{len(faults)} of {len(apart)}: {some(told)}"
        if faults
        else f"{len(apart)} tensors, {max(apart.values()):.1e} apart at most",
        wanted=f"transformers' within {tolerance:g}",
        where=source_of(stage),
    )


def _from_hub(architecture: Architecture, name: str, saved: Mapping[str, Tensor]) -> Tensor:
    names = architecture.hf_name(name)
    if whole_model.numbers_experts(names):
        return torch.stack([saved[name] for name in names])
    return saved[names[0]]


def _trail(
    stage: Stage, tokens_BS: Tensor, wanted: transformers_model.Outcome, tolerance: float
) -> tuple[str, str]:
    """Where on the way to the logits the two part: in words, and the place to look at."""
    file, equal = source_of(stage), "nothing before"
    for name, state in whole_model.states(stage, tokens_BS).items():
        if name not in wanted.states:
            continue
        far = distance(state, wanted.states[name].view_as(state))
        if not far <= tolerance:
            return f": {name} {far:.1e} apart, {equal} equal", f"{file}: {_suspect(name)}"
        equal = name
    return f": {equal} equal", f"{file}: the final norm or the head"


def _suspect(state: str) -> str:
    """What makes the state of this name out of the one before."""
    match state.split():
        case [*_, "layer", number, "reads"]:
            return f"attention, rope or norms of layer {number}"
        case [*_, "layer", number]:
            return f"router, experts or MLP of layer {number}"
    return "the embedding"


def _flops(subject: Subject, counted: float) -> Check:
    """All matrix products of forward and backward, each as if no mask were causal.

    Not counted, here as there: what is no matrix product (look-up, norms, softmax, weighted sums),
    and the rotary angles.
    """
    architecture = subject.architecture
    said = architecture.flops_per_token(whole_model.LENGTH, causal=False)
    return subject.check(
        "FLOPs per token",
        abs(said - counted) <= FLOPS_TOLERANCE * counted,
        found=f"{said:.1f} ({said / counted - 1:+.2%})",
        wanted=f"{counted:.1f}: the matrix products that transformers ran",
        where=f"{subject.facts_file} layer_costs, head_cost",
    )
