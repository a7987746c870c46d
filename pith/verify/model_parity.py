"""A family against transformers: the same weights and tokens give the same numbers.

All is judged by what transformers computes in float64, tensor by tensor. In float64 a tensor may be
FLOAT64 apart from that. In float32 it may be FLOAT32 apart, or FOREIGN times as far as the float32
of transformers is, whose sums are rounded no better; no further than MOST_FLOAT32, so that an
oracle that is far off by itself excuses nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pith.arch import Architecture
from pith.layer.protocol import Stage
from pith.report import Check
from pith.verify import transformers_model, whole_model
from pith.verify.subject import Subject, distance, some, source_of

# ||found - wanted|| <= limit * ||wanted||, per tensor.
FLOAT64, FLOAT32 = 1e-10, 1e-5
FOREIGN, MOST_FLOAT32 = 4, 1e-4
FLOPS_TOLERANCE = 1e-9  # of a sum of whole numbers in float64


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a tensor is from what transformers computes in float64, and how far it may be."""

    far: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.far <= self.limit

    def __str__(self) -> str:
        """In as many digits as tell the two figures of a failure apart."""
        if self.ok:
            return f"{self.far:.1e} apart"
        pairs = ((f"{self.far:.{n}e}", f"{self.limit:.{n}e}") for n in range(1, 18))
        far, limit = next(pair for pair in pairs if pair[0] != pair[1])
        return f"{far} apart (limit {limit})"


@dataclass(frozen=True, slots=True)
class Oracle:
    """What transformers computes in float64, and in the type that is checked."""

    dtype: torch.dtype
    exact: transformers_model.Outcome
    own: transformers_model.Outcome

    @property
    def kind(self) -> str:
        """The type in words."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def wanted(self) -> str:
        """What is asked of every tensor."""
        if self.dtype is torch.float64:
            return f"transformers' within {FLOAT64:g}"
        return (
            f"transformers' in float64 within {FLOAT32:g}, or {FOREIGN} times the error of its own "
            f"float32 up to {MOST_FLOAT32:g}"
        )

    def gap(self, found: Tensor, exact: Tensor, own: Tensor) -> Gap:
        """Judge one tensor of pith by the same one of `exact` and of `own`."""
        limit = FLOAT64
        if self.dtype is not torch.float64:
            limit = max(FLOAT32, min(FOREIGN * distance(own, exact), MOST_FLOAT32))
        return Gap(distance(found, exact), limit)


def check_parity(subject: Subject) -> Iterator[Check]:
    """Logits, loss and every gradient, in each type, and the FLOPs that they took."""
    architecture = subject.architecture
    batch = whole_model.make_batch(architecture.vocab_size)
    exact: transformers_model.Outcome | None = None
    for dtype in (torch.float64, torch.float32):
        stage = whole_model.build_whole(architecture, dtype)
        weights = whole_model.to_hub(architecture, whole_model.weights(stage, architecture))
        counts_flops = dtype is torch.float32
        own = transformers_model.run(subject.config, weights, *batch, counts_flops=counts_flops)
        exact = exact or own
        yield from _compare(subject, stage, batch, Oracle(dtype, exact, own))
        if own.flops is not None:
            yield _flops(subject, own.flops / batch[0].numel())


def _compare(
    subject: Subject, stage: Stage, batch: tuple[Tensor, Tensor], oracle: Oracle
) -> Iterator[Check]:
    """One forward and backward pass against the oracle."""
    exact, own, kind = oracle.exact, oracle.own, oracle.kind
    logits_BSV, loss = whole_model.backward(stage, batch)
    gap = oracle.gap(logits_BSV, exact.logits_BSV, own.logits_BSV)
    told, where = ("", source_of(stage)) if gap.ok else _trail(stage, batch[0], oracle)
    yield subject.check(
        f"logits, {kind}", gap.ok, found=f"{gap}{told}", wanted=oracle.wanted, where=where
    )
    is_forward_equal = gap.ok
    gap = oracle.gap(loss, exact.loss, own.loss)
    yield subject.check(
        f"loss, {kind}",
        gap.ok,
        found=str(gap),
        wanted=oracle.wanted,
        where=f"{source_of(stage)} loss",
    )
    yield _gradients(subject, stage, oracle, is_forward_equal=is_forward_equal)


def _gradients(subject: Subject, stage: Stage, oracle: Oracle, *, is_forward_equal: bool) -> Check:
    """Every canonical gradient; of those that differ the nearest to the loss is named first."""
    architecture = subject.architecture
    found = whole_model.gradients(stage, architecture)
    gaps = {
        spec.name: oracle.gap(
            found[spec.name],
            _from_hub(architecture, spec.name, oracle.exact.grads),
            _from_hub(architecture, spec.name, oracle.own.grads),
        )
        for spec in architecture.parameters()
    }
    faults = [name for name, gap in gaps.items() if not gap.ok]
    if is_forward_equal:
        faults.reverse()  # a wrong backward spoils what comes after it, which is what lies below
    told = [f"{name} {gaps[name]}" for name in faults]
    return subject.check(
        f"every gradient, {oracle.kind}",
        not faults,
        found=f"{len(faults)} of {len(gaps)}: {some(told)}"
        if faults
        else f"{len(gaps)} tensors, {max(gap.far for gap in gaps.values()):.1e} apart at most",
        wanted=oracle.wanted,
        where=source_of(stage),
    )


def _from_hub(architecture: Architecture, name: str, saved: Mapping[str, Tensor]) -> Tensor:
    names = architecture.hf_name(name)
    if whole_model.numbers_experts(names):
        return torch.stack([saved[name] for name in names])
    return saved[names[0]]


def _trail(stage: Stage, tokens_BS: Tensor, oracle: Oracle) -> tuple[str, str]:
    """Where on the way to the logits the two part: in words, and the place to look at."""
    file, equal = source_of(stage), "nothing before"
    exact, own = oracle.exact.states, oracle.own.states
    for name, state in whole_model.states(stage, tokens_BS).items():
        if name not in exact:
            continue
        gap = oracle.gap(state, exact[name].view_as(state), own[name].view_as(state))
        if not gap.ok:
            return f": {name} {gap}, {equal} equal", f"{file}: {_suspect(name)}"
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
