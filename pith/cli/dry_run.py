"""`pith train --dry-run`: the plan of a run as data and as text, without torch.

The data: recipe, world_size, layout {pp, dp, cp, ep}, weights {shards, expert_shards, copies},
experts {per_rank, exchange} (null for a dense model), schedule, num_stages, num_micro_batches,
steps, rows (one string per pipeline rank), predicted {efficiency, bubble_share, peak_live (layers,
by pipeline rank)} at the FLOPs of the layers, candidates (what auto chose from, else null), batch
{global_batch_size, micro_batch_size, num_micro_batches, data_ranks, sequence_length,
tokens_per_step}, model {num_parameters, num_active_parameters, flops_per_token, flops_per_step},
stages [{stage, rank, first_layer, num_layers, num_parameters, flops_share}], learning_rate [{name,
first, last, start, end}], warnings [text].
"""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pith.config import Recipe
from pith.plan.dry_run import DryRun, RatePhase, StagePlan, describe, rate_phases
from pith.plan.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from pith.schedule import draw
from pith.schedule.simulate import simulate
from pith.schedule.timeline import Timeline


def dry_run(
    recipe: Recipe, *, world_size: int | None = None, width: int = 100
) -> tuple[dict[str, Any], str]:
    """The plan of `recipe` on `world_size` ranks (pp * cp * ep without it): data, and text no
    wider than `width` columns. Raises RequestError where the layout does not fit the world."""
    plan = describe(
        recipe.architecture,
        mesh=recipe.mesh(world_size),
        batch=recipe.batch(world_size),
        pipeline=recipe.pipeline(world_size),
    )
    optimizer = recipe.optimizer
    rates = rate_phases(
        optimizer.schedule,
        peak=optimizer.lr,
        steps=recipe.training.steps,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=optimizer.decay_steps,
        min_lr_ratio=optimizer.min_lr_ratio,
    )
    warnings = tuple(_warnings(recipe))
    data = _data(recipe, plan, rates) | {"warnings": list(warnings)}
    return data, "\n".join(_lines(recipe, plan, rates, warnings, width))


def _warnings(recipe: Recipe) -> Iterator[str]:
    for fault in recipe.not_trainable_yet():
        yield str(fault)
    corpus = recipe.data.corpus
    if corpus != "embedded" and not os.path.exists(corpus):
        yield f"data.corpus: nothing at {corpus!r}; training needs --set data.corpus=PATH"
    if ignored := recipe.architecture.ignored:
        yield f"model.fields: not known and not read: {', '.join(ignored)}"


def _data(recipe: Recipe, plan: DryRun, rates: tuple[RatePhase, ...]) -> dict[str, Any]:
    mesh, batch, table, choice = plan.mesh, plan.batch, plan.pipeline.table, plan.pipeline.choice
    return {
        "recipe": recipe.name,
        "world_size": mesh.world_size,
        "layout": {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep},
        "weights": _spread(mesh),
        "experts": _experts(recipe),
        "schedule": table.name,
        "num_stages": table.placement.num_stages,
        "num_micro_batches": table.num_micro_batches,
        "steps": recipe.training.steps,
        "rows": list(table.row_texts()),
        "predicted": {
            "efficiency": plan.simulation.efficiency,
            "bubble_share": _bubble_share(plan),
            "peak_live": list(plan.simulation.peak_live),
        },
        "candidates": [asdict(candidate) for candidate in choice.candidates] if choice else None,
        "batch": asdict(batch) | {"tokens_per_step": batch.tokens_per_step},
        "model": {
            "num_parameters": plan.num_parameters,
            "num_active_parameters": plan.num_active_parameters,
            "flops_per_token": plan.flops_per_token,
            "flops_per_step": plan.flops_per_step,
        },
        "stages": [_stage_data(stage) for stage in plan.stages],
        "learning_rate": [asdict(phase) for phase in rates],
    }


def _spread(mesh: Mesh) -> dict[str, int]:
    """Over how many ranks the weights of a stage are cut, and how many such copies there are."""
    sizes = mesh.sizes()
    return {
        "shards": math.prod(sizes[axis] for axis in DENSE_AXES),
        "expert_shards": math.prod(sizes[axis] for axis in EXPERT_AXES),
        "copies": sizes["replica"],
    }


def _experts(recipe: Recipe) -> dict[str, int | str] | None:
    num_experts = recipe.architecture.num_experts
    if num_experts == 0:
        return None
    return {"per_rank": num_experts // recipe.parallel.ep, "exchange": recipe.exchange_name}


def _stage_data(stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "rank": stage.rank,
        "first_layer": stage.layers.start,
        "num_layers": len(stage.layers),
        "num_parameters": stage.num_parameters,
        "flops_share": stage.flops_share,
    }


def _lines(
    recipe: Recipe,
    plan: DryRun,
    rates: tuple[RatePhase, ...],
    warnings: tuple[str, ...],
    width: int,
) -> Iterator[str]:
    mesh, batch = plan.mesh, plan.batch
    yield f"recipe     {recipe.name}: {recipe.training.steps} steps, {recipe.training.precision}"
    yield (
        f"mesh       {mesh.world_size} ranks = pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} "
        f"x ep {mesh.ep}"
    )
    spread, experts = _spread(mesh), _experts(recipe)
    kind = "fsdp" if spread["copies"] == 1 else f"hsdp, {spread['copies']} copies"
    yield (
        f"weights    {kind}: those of a stage are cut over {spread['shards']} ranks, "
        f"of its experts over {spread['expert_shards']}"
    )
    if experts is not None and mesh.ep > 1:
        held, exchange = experts["per_rank"], experts["exchange"]
        yield f"experts    {held} of a layer on a rank, exchange {exchange}"
    yield (
        f"model      {_short(plan.num_parameters)} parameters, "
        f"{_short(plan.num_active_parameters)} active per token"
    )
    yield (
        f"work       {_short(plan.flops_per_token)}FLOPs per token, "
        f"{_short(plan.flops_per_step)}FLOPs per step (forward and backward, causal)"
    )
    yield (
        f"batch      {batch.global_batch_size} sequences = {batch.micro_batch_size} "
        f"x {batch.num_micro_batches} micro-batches x {batch.data_ranks} data ranks; "
        f"{batch.tokens_per_step:,} tokens per step"
    )
    for label, phase in zip(["rate", "", ""], rates, strict=False):
        steps = f"steps {phase.first} to {phase.last}"
        yield f"{label:<10} {phase.name}, {steps}: {phase.start:.3g} to {phase.end:.3g}"
    for label, stage in zip(["stages", *[""] * len(plan.stages)], plan.stages, strict=False):
        yield f"{label:<10} {_stage_line(stage)}"
    name = f"{plan.pipeline.table.name}{', chosen by auto' if plan.pipeline.choice else ''}"
    efficiency = plan.simulation.efficiency
    more = " (above 1: pairs overlap)" if efficiency > 1 else ""
    yield (
        f"schedule   {name}; at the FLOPs of the layers efficiency "
        f"{efficiency:.3f}{more}, bubble {_bubble_share(plan):.1%}"
    )
    yield draw.text(Timeline.planned(simulate(plan.pipeline.table)), width=width)
    for warning in warnings:
        yield f"warning    {warning}"


def _bubble_share(plan: DryRun) -> float:
    """The part of the step in which the busiest pipeline rank idles."""
    return float(plan.simulation.bubble / (plan.simulation.makespan or 1))


def _stage_line(stage: StagePlan) -> str:
    layers = stage.layers
    held = f"layers {layers.start} to {layers.stop - 1}" if layers else "no layer"
    return (
        f"{stage.stage} on pipeline rank {stage.rank}: {held}, "
        f"{_short(stage.num_parameters)} parameters, {stage.flops_share:.1%} of the work"
    )


def _short(number: float) -> str:
    """A count in three digits and the prefix of its size: "30.5 G", "4.04 M"."""
    prefixes = ("", *"kMGTPEZYRQ")
    size = 0
    while number >= 999.5 and size < len(prefixes) - 1:
        number, size = number / 1000, size + 1
    return f"{number:.3g} {prefixes[size]}"
