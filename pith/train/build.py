"""Puts a recipe together: groups, stages, channels, executors, optimizer.

The one place that knows models and engine at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pith.arch import Architecture
from pith.arch.parameter import ParameterSpec
from pith.arch.qwen3 import Qwen3
from pith.comm.channels import Transport, Wire
from pith.comm.collectives import CollectiveExchange
from pith.comm.exchange import Exchange, LocalExchange
from pith.comm.groups import Groups
from pith.comm.splits import SplitExchange
from pith.comm.stopwatch import Stopwatch
from pith.comm.world import World
from pith.config import Recipe
from pith.engine.executor import Executor
from pith.engine.shard import Parameters, Spread, Tied
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Parts, Stage
from pith.models.qwen3 import Qwen3Stage
from pith.ops import Operators, choose
from pith.ops.precision import wide
from pith.plan.mesh import DATA_AXES, DENSE_AXES, EXPERT_AXES, Mesh
from pith.plan.pipeline import Pipeline
from pith.schedule.lower import channels
from pith.schedule.passes import forward_only
from pith.schedule.table import Table
from pith.schedule.verify import check
from pith.train.initial import fill
from pith.train.optim import build_optimizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Model:
    """One rank's share of the model and the machinery that trains it."""

    architecture: Architecture
    operators: Operators
    table: Table
    mesh: Mesh
    groups: Groups
    stopwatch: Stopwatch
    stages: Mapping[int, Stage]
    parameters: Parameters
    training: Executor
    evaluation: Executor
    optimizer: torch.optim.Optimizer

    def close(self) -> None:
        """Let go of the process groups; every rank calls it."""
        self.groups.close()


def build(recipe: Recipe, world: World, *, headers: bool = False, empty: bool = False) -> Model:
    """Build this rank's share of `recipe` with its initial weights.

    With `empty` the weights are left uninitialised, to be loaded. `headers` labels pipeline
    messages and asserts the labels. Every rank calls this at the same
    time: groups are opened and the schedule is agreed on. Needs a process group, if only of one.
    """
    pipeline = recipe.pipeline(world.size)
    table = pipeline.table
    check(table)
    world.agree("schedule", table.digest())
    groups = Groups(recipe.mesh(world.size), world)
    operators = choose(world.device.type, recipe.operators, recipe.sizes)
    weights, stopwatch = WeightGrads(), Stopwatch()
    parts = _parts(recipe, groups, operators=operators, weights=weights, stopwatch=stopwatch)
    rank = groups.mesh.coordinates(world.rank).pp
    stages = _build_stages(recipe, pipeline, rank, parts=parts)
    parameters = Parameters(
        stages,
        dense=Spread.over(groups, *DENSE_AXES),
        experts=Spread.over(groups, *EXPERT_AXES),
        first_expert=parts.first_expert,
        compute_dtype=DTYPES[recipe.training.precision],
        device=world.device,
        weights=weights,
        tied=_tie(recipe, table, stages, groups),
    )
    specs = {spec.name: spec for spec in recipe.architecture.parameters()}
    if not empty:
        _initialise(parameters, specs, seed=recipe.training.seed)
    transport = _connect(recipe, table, groups, headers=headers)
    groups.along(*DATA_AXES)
    groups.seal()

    def executor(plan: Table) -> Executor:
        return Executor(
            plan,
            rank=rank,
            stages=stages,
            transport=transport,
            weights=weights,
            stopwatch=stopwatch,
        )

    return Model(
        architecture=recipe.architecture,
        operators=operators,
        table=table,
        mesh=groups.mesh,
        groups=groups,
        stopwatch=stopwatch,
        stages=stages,
        parameters=parameters,
        training=executor(table),
        evaluation=executor(forward_only(table)),
        optimizer=_optimizer(recipe, parameters, specs),
    )


def build_stage(
    architecture: Architecture,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    parts: Parts,
    dtype: torch.dtype,
) -> Stage:
    """One stage of a family, empty, on the meta device. The match to extend with a family."""
    place: dict[str, Any] = {"is_first": is_first, "is_last": is_last}
    made_of: dict[str, Any] = {"parts": parts, "dtype": dtype}
    stage: Stage
    match architecture:
        case Qwen3():
            stage = Qwen3Stage(architecture, layers, **place, **made_of)
    return stage


def _parts(
    recipe: Recipe,
    groups: Groups,
    *,
    operators: Operators,
    weights: WeightGrads,
    stopwatch: Stopwatch,
) -> Parts:
    mesh, num_experts = groups.mesh, recipe.architecture.num_experts
    num_local = num_experts // mesh.ep
    return Parts(
        operators=operators,
        exchange=_exchange(recipe.exchange_name, groups, num_experts=num_experts),
        sink=weights,
        num_local_experts=num_local,
        first_expert=num_local * mesh.coordinates(groups.world.rank).ep,
        stopwatch=stopwatch,
    )


def _exchange(name: str, groups: Groups, *, num_experts: int) -> Exchange:
    match name:
        case "local":
            return LocalExchange()
        case "collectives":
            return CollectiveExchange(groups.along("ep"))
        case "splits":
            return SplitExchange(groups.along("ep"), num_experts=num_experts)
    raise AssertionError(name)


def _build_stages(
    recipe: Recipe, pipeline: Pipeline, rank: int, *, parts: Parts
) -> dict[int, Stage]:
    place = pipeline.table.placement
    return {
        stage: build_stage(
            recipe.architecture,
            pipeline.split[stage],
            is_first=stage == 0,
            is_last=stage == place.num_stages - 1,
            parts=parts,
            dtype=wide(DTYPES[recipe.training.precision]),
        )
        for stage in place.stages(rank)
    }


def _tie(recipe: Recipe, table: Table, stages: Mapping[int, Stage], groups: Groups) -> Tied | None:
    """Join embedding and head where the model ties them. Opens a group when two ranks hold them."""
    if not recipe.architecture.tie_word_embeddings:
        return None
    place = table.placement
    last = place.num_stages - 1
    first_rank, last_rank = place.rank(0), place.rank(last)
    group: dist.ProcessGroup | None = None
    if first_rank != last_rank:
        group = groups.pair_up(first_rank, last_rank)
    return Tied(first=stages.get(0), last=stages.get(last), group=group)


def _initialise(parameters: Parameters, specs: Mapping[str, ParameterSpec], *, seed: int) -> None:
    for name, master in parameters.masters.items():
        fill(master, specs[name], seed=seed, first_row=parameters.first_rows[name])


def _optimizer(
    recipe: Recipe, parameters: Parameters, specs: Mapping[str, ParameterSpec]
) -> torch.optim.Optimizer:
    optimizer = recipe.optimizer
    return build_optimizer(
        parameters.masters,
        specs,
        name=optimizer.name,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        lr=optimizer.lr,
    )


def _connect(recipe: Recipe, table: Table, groups: Groups, *, headers: bool) -> Transport:
    training, world = recipe.training, groups.world
    shapes = recipe.architecture.carry_shapes(training.micro_batch_size, training.sequence_length)
    wire = Wire(
        shapes=shapes,
        dtype=DTYPES[training.precision],
        device=world.device,
        staged=world.staged,
        headers=headers,
    )
    pipeline = groups.mesh.peers(world.rank, "pp")
    return Transport(
        wire,
        rank=pipeline.index(world.rank),
        pipeline=pipeline,
        groups=groups.channels(channels(table)),
    )
