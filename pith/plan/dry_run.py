"""What a run would be, in numbers, before any process starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from pith.arch import Architecture
from pith.plan.batch import Batch
from pith.plan.mesh import Mesh
from pith.plan.pipeline import Pipeline
from pith.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: the pipeline rank that computes it, its layers, what it holds and its work."""

    stage: int
    rank: int
    layers: range
    num_parameters: int  # of every tensor it holds; a tied head counts here again
    flops_share: float  # of the whole model's FLOPs per token


@dataclass(frozen=True, slots=True)
class RatePhase:
    """Steps `first` to `last` (from 1, inclusive), the rate going from `start` to `end`."""

    name: str
    first: int
    last: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of one run. FLOPs are forward and backward, the attention mask causal."""

    mesh: Mesh
    batch: Batch
    pipeline: Pipeline
    simulation: Simulation  # at the costs of the layers
    stages: tuple[StagePlan, ...]
    num_parameters: int
    num_active_parameters: int
    flops_per_token: float
    flops_per_step: float


def describe(model: Architecture, *, mesh: Mesh, batch: Batch, pipeline: Pipeline) -> DryRun:
    """The plan of training `model` as `pipeline`."""
    flops_per_token = model.flops_per_token(batch.sequence_length)
    return DryRun(
        mesh=mesh,
        batch=batch,
        pipeline=pipeline,
        simulation=simulate(pipeline.table, pipeline.costs),
        stages=tuple(_stages(model, pipeline, batch.sequence_length)),
        num_parameters=model.num_parameters(),
        num_active_parameters=model.num_active_parameters(),
        flops_per_token=flops_per_token,
        flops_per_step=flops_per_token * batch.tokens_per_step,
    )


def _stages(model: Architecture, pipeline: Pipeline, length: int) -> Iterator[StagePlan]:
    costs, whole = model.layer_costs(length), model.flops_per_token(length)
    edges = {spec.name: spec.num_elements for spec in model.parameters() if spec.layer is None}
    embedding, head = edges["embed_tokens.weight"], edges.get("lm_head.weight")
    for stage, layers in enumerate(pipeline.split):
        is_first, is_last = stage == 0, stage == len(pipeline.split) - 1
        flops = sum(costs[layer] for layer in layers)
        held = sum(s.num_elements for layer in layers for s in model.layer_parameters(layer))
        if is_first:
            flops, held = flops + model.embedding_cost(length), held + embedding
        if is_last:
            flops, held = flops + model.head_cost(length), held + edges["norm.weight"]
            tied = 0 if is_first else embedding
            held += tied if head is None else head
        yield StagePlan(stage, pipeline.table.placement.rank(stage), layers, held, flops / whole)


def rate_phases(
    schedule: str,
    *,
    peak: float,
    steps: int,
    warmup_steps: int,
    decay_steps: int,
    min_lr_ratio: float,
) -> tuple[RatePhase, ...]:
    """The phases of the learning rate that have a step, in order."""
    if schedule == "cosine":
        decay_steps = steps - warmup_steps
    stable = steps - warmup_steps - decay_steps
    ends = (warmup_steps, warmup_steps + stable, steps)
    phases = (
        RatePhase("warm-up", 1, ends[0], peak / max(1, warmup_steps), peak),
        RatePhase("stable", ends[0] + 1, ends[1], peak, peak),
        RatePhase("decay", ends[1] + 1, ends[2], peak, peak * min_lr_ratio),
    )
    return tuple(phase for phase in phases if phase.first <= phase.last)
