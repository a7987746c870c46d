"""Puts a recipe together: stages, channels, executors, optimizer.

The one place that knows models and engine at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pith.arch import Architecture
from pith.arch.parameter import ParameterSpec
from pith.arch.qwen3 import Qwen3
from pith.comm.channels import Transport, Wire, open_channels
from pith.comm.exchange import LocalExchange
from pith.comm.world import World
from pith.config import Recipe
from pith.engine.executor import Executor
from pith.engine.shard import Parameters, Tied
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Parts, Stage
from pith.models.qwen3 import Qwen3Stage
from pith.ops import Operators, choose
from pith.schedule.lower import channels
from pith.schedule.passes import forward_only
from pith.schedule.table import Table
from pith.schedule.verify import check
from pith.train.initial import fill
from pith.train.optim import build_optimizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Model:
    """One rank's share of the model and the machinery that trains it."""

    architecture: Architecture
    operators: Operators
    table: Table
    stages: Mapping[int, Stage]
    parameters: Parameters
    owned: frozenset[str]  # canonical names that this rank counts and saves
    training: Executor
    evaluation: Executor
    optimizer: torch.optim.Optimizer


def build(recipe: Recipe, world: World, *, headers: bool = False) -> Model:
    """Build this rank's share of `recipe` with its initial weights.

    `headers` labels pipeline messages and asserts the labels. Every rank calls this at the same
    time: channels are opened and the schedule is agreed on.
    """
    table = recipe.table(world.size)
    check(table)
    world.agree("schedule", table.digest())
    mesh = recipe.mesh(world.size)
    pipeline = mesh.pipeline_ranks(world.rank)
    rank = pipeline.index(world.rank)
    operators = choose(world.device.type, recipe.operators)
    weights = WeightGrads()
    parts = Parts(
        operators=operators,
        exchange=LocalExchange(),
        sink=weights,
        num_local_experts=recipe.architecture.num_experts,
        first_expert=0,
    )
    stages = _build_stages(recipe, table, rank, parts=parts, device=world.device)
    tied = _tie(recipe.architecture, table, stages, pipeline, world)
    named = canonical_parameters(stages, tied)
    parameters = Parameters(named, weights=weights, tied=tied)
    specs = {spec.name: spec for spec in recipe.architecture.parameters()}
    _initialise(parameters, specs, seed=recipe.training.seed)
    transport = _connect(recipe, table, rank, pipeline, world, headers=headers)

    def executor(plan: Table) -> Executor:
        return Executor(plan, rank=rank, stages=stages, transport=transport, weights=weights)

    optimizer = recipe.optimizer
    return Model(
        architecture=recipe.architecture,
        operators=operators,
        table=table,
        stages=stages,
        parameters=parameters,
        owned=frozenset(named) - _borrowed(tied),
        training=executor(table),
        evaluation=executor(forward_only(table)),
        optimizer=build_optimizer(
            parameters.masters,
            specs,
            name=optimizer.name,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            lr=optimizer.lr,
        ),
    )


def build_stage(
    architecture: Architecture,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device,
) -> Stage:
    """One stage of a family. The match to extend when a family is added."""
    match architecture:
        case Qwen3():
            return Qwen3Stage(
                architecture,
                layers,
                is_first=is_first,
                is_last=is_last,
                parts=parts,
                dtype=dtype,
                device=device,
            )


def canonical_parameters(stages: Mapping[int, Stage], tied: Tied | None) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name; a tied head goes by the embedding's name."""
    named: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        named.update(stage.named_parameters())
    if tied is not None and tied.head is not None:
        head = named.pop(HEAD)
        named.setdefault(EMBEDDING, head)
    return named


def _build_stages(
    recipe: Recipe, table: Table, rank: int, *, parts: Parts, device: torch.device
) -> dict[int, Stage]:
    architecture, split = recipe.architecture, recipe.layer_split()
    return {
        stage: build_stage(
            architecture,
            split[stage],
            is_first=stage == 0,
            is_last=stage == table.placement.num_stages - 1,
            parts=parts,
            dtype=DTYPES[recipe.training.precision],
            device=device,
        )
        for stage in table.placement.stages(rank)
    }


def _tie(
    architecture: Architecture,
    table: Table,
    stages: Mapping[int, Stage],
    pipeline: tuple[int, ...],
    world: World,
) -> Tied | None:
    """Join embedding and head where the model ties them. Opens a group when two ranks hold them."""
    if not architecture.tie_word_embeddings:
        return None
    place = table.placement
    first_rank, last_rank = place.rank(0), place.rank(place.num_stages - 1)
    apart = first_rank != last_rank
    group = world.group([pipeline[first_rank], pipeline[last_rank]]) if apart else None
    first, last = stages.get(0), stages.get(place.num_stages - 1)
    embedding = first.get_parameter(EMBEDDING) if first is not None else None
    if last is not None and embedding is not None:
        last.tie_to(embedding)
    head = last.get_parameter(HEAD) if last is not None else None
    return Tied(embedding, head, group)


def _borrowed(tied: Tied | None) -> frozenset[str]:
    """Parameters that another rank counts and saves."""
    away = tied is not None and tied.head is not None and tied.embedding is None
    return frozenset({EMBEDDING}) if away else frozenset()


def _initialise(parameters: Parameters, specs: Mapping[str, ParameterSpec], *, seed: int) -> None:
    for name, master in parameters.masters.items():
        fill(master, specs[name], seed=seed)
    parameters.gather()


def _connect(
    recipe: Recipe,
    table: Table,
    rank: int,
    pipeline: tuple[int, ...],
    world: World,
    *,
    headers: bool,
) -> Transport:
    training = recipe.training
    wire = Wire(
        shapes=(
            (
                training.micro_batch_size,
                training.sequence_length,
                recipe.architecture.hidden_size,
            ),
        ),
        dtype=DTYPES[training.precision],
        device=world.device,
        staged=world.staged,
        headers=headers,
    )
    groups = open_channels(channels(table), pipeline=pipeline, world=world)
    return Transport(wire, rank=rank, pipeline=pipeline, groups=groups)
