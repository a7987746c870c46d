"""The recipe: one training run as a frozen value, validated whole before anything starts."""

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, ValidationError, ValidationInfo, model_validator

from pith import arch, ops
from pith.arch import Architecture
from pith.config import faults as wording
from pith.config.sections import (
    BalanceSection,
    CheckpointSection,
    DataSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    Section,
    TrainingSection,
    ValidationSection,
)
from pith.config.source import override, read, refuse_boundless, resolve_model
from pith.errors import Fault, RequestError
from pith.plan import limits
from pith.plan.batch import Batch, plan_batch
from pith.plan.mesh import Mesh
from pith.plan.pipeline import Cutter, Pipeline, plan_pipeline
from pith.schedule.table import Table

# A token with k of E experts needs nearly every one of few ranks; then counts are not worth it.
MOST_RANKS_FOR_COLLECTIVES = 4
# What "auto" takes a pair to need of the time of its parts: one's exchange hides under the other.
PAIR_WITH_EXCHANGE = 0.9
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class Recipe(Section):
    """A training run, complete and validated. `operators` overrides implementations by name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "recipe"
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    training: TrainingSection
    optimizer: OptimizerSection
    balance: BalanceSection = BalanceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    log: LogSection = LogSection()
    operators: dict[str, str] = Field(default_factory=dict)
    model: ModelSection

    @model_validator(mode="after")
    def _hold_together(self, info: ValidationInfo) -> "Recipe":
        context = info.context or {}
        faults = _relations(self, context.get("world_size"), context.get("unread", frozenset()))
        if faults:
            raise wording.invalid(faults)
        return self

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        overrides: Sequence[str] = (),
        world_size: int | None = None,
    ) -> "Recipe":
        """The shipped recipe of that name, or the file (or its folder) at that path.

        `overrides` are "section.key=value" with a TOML value or a bare word. `world_size` checks
        the layout against so many ranks; without it against the fewest, where dp is dp_shard or 1.
        Raises RequestError with all faults.
        """
        raw, folder = read(str(name_or_path))
        faults = (*override(raw, overrides), *resolve_model(raw, folder), *refuse_boundless(raw))
        return _validated(raw, world_size=world_size, faults=faults)

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> "Recipe":
        """The recipe that `to_toml` wrote, checked as by `load`."""
        return _validated(tomllib.loads(text), world_size=world_size, faults=())

    @property
    def architecture(self) -> Architecture:
        """The model as facts."""
        return arch.from_config(self.model.fields or {})

    @property
    def sizes(self) -> ops.Sizes:
        """What decides which operators serve."""
        return _sizes(self.architecture, self.training.precision)

    @property
    def balance_coefficient(self) -> float:
        """The weight of the balance loss; 0 where its scope is none."""
        return self.balance.coefficient if self.balance.scope != "none" else 0.0

    @property
    def exchange_name(self) -> str:
        """How tokens reach their experts, "auto" resolved; on one expert rank they stay."""
        if self.parallel.ep == 1:
            return "local"
        if self.parallel.exchange != "auto":
            return self.parallel.exchange
        return "collectives" if self.parallel.ep <= MOST_RANKS_FOR_COLLECTIVES else "splits"

    def mesh(self, world_size: int | None = None) -> Mesh:
        """The mesh of `world_size` ranks (pp * cp * ep * dp_shard without it)."""
        axes = self.parallel
        if world_size is None:
            world_size = axes.pp * axes.cp * axes.ep * (axes.dp_shard or 1)
        return Mesh.of_world(world_size, pp=axes.pp, cp=axes.cp, ep=axes.ep, dp_shard=axes.dp_shard)

    def batch(self, world_size: int | None = None) -> Batch:
        """The batch arithmetic of one step."""
        return self._batch(self.mesh(world_size).num_data_ranks)

    def _batch(self, data_ranks: int) -> Batch:
        training = self.training
        return plan_batch(
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            data_ranks=data_ranks,
            sequence_length=training.sequence_length,
        )

    def pipeline(self, world_size: int | None = None) -> Pipeline:
        """The schedule table that this recipe runs on `world_size` ranks, and its stages."""
        parallel, model = self.parallel, self.architecture
        explicit = parallel.layers_per_stage
        return plan_pipeline(
            parallel.schedule,
            pp=parallel.pp,
            num_micro_batches=self.batch(world_size).num_micro_batches,
            num_stages=parallel.num_stages or (len(explicit) if explicit else None),
            most_stages=limits.most_stages(model.num_layers),
            cutter=Cutter(model, self.training.sequence_length, explicit),
            pair=PAIR_WITH_EXCHANGE if parallel.ep > 1 else 1.0,
        )

    def table(self, world_size: int | None = None) -> Table:
        """The schedule table alone."""
        return self.pipeline(world_size).table

    def not_trainable_yet(self) -> tuple[Fault, ...]:
        """What is sound in this recipe but cannot be trained by this version."""
        cp = self.parallel.cp
        wanted = "1: this version does not cut sequences"
        return (Fault("parallel.cp", str(cp), wanted, ("1",)),) if cp > 1 else ()

    def to_toml(self, *, explicit: bool = False) -> str:
        """The resolved recipe; `Recipe.load` of it gives an equal value.

        With `explicit` only what is no default, which another version may set otherwise.
        """
        tables = self.model_dump(mode="json", exclude_none=True, exclude_defaults=explicit)
        if self.training.clip is None:
            tables["training"]["clip"] = "none"  # absent means its default
        return tomli_w.dumps(tables)

    def digest(self) -> str:
        """A hash of everything the recipe says."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of recipe files."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | cls.model_json_schema()


def _validated(raw: dict[str, Any], *, world_size: int | None, faults: tuple[Fault, ...]) -> Recipe:
    """The recipe of `raw`. What is wrong is replaced and read again until all faults are known."""
    found = list(faults)
    unread = {fault.where for fault in faults}
    while True:
        context = {"world_size": world_size, "unread": frozenset(unread)}
        try:
            recipe = Recipe.model_validate(raw, context=context)
        except ValidationError as error:
            for entry in error.errors(include_url=False):
                fault = wording.fault(Recipe, entry)
                if fault.where not in unread:
                    found.append(fault)
                unread |= {fault.where, ".".join(str(part) for part in entry["loc"][:2])}
                wording.repair(Recipe, raw, entry)
        except RequestError as error:
            raise wording.invalid((*found, *error.faults)) from None
        else:
            if found:
                raise wording.invalid(tuple(found))
            return recipe


def _relations(recipe: Recipe, world_size: int | None, unread: frozenset[str]) -> tuple[Fault, ...]:
    """Every relation between values that does not hold, as far as its values could be read."""
    model, faults = _examine_model(recipe, unread)
    unread |= {fault.where for fault in faults}

    def readable(*names: str) -> bool:
        return not unread & {*names, *(name.rpartition(".")[0] for name in names)}

    own = _layout_relations(recipe, world_size, readable)
    with_model = () if model is None else _model_relations(recipe, model, readable)
    sizes = None if model is None else _sizes(model, recipe.training.precision)
    return (*faults, *own, *with_model, *ops.examine(recipe.operators, sizes))


def _sizes(model: Architecture, precision: str) -> ops.Sizes:
    item_bytes = ITEM_BYTES[precision]
    if model.num_experts == 0:
        return ops.Sizes(item_bytes)
    return ops.Sizes(item_bytes, (model.hidden_size, model.moe_intermediate_size))


def _examine_model(
    recipe: Recipe, unread: frozenset[str]
) -> tuple[Architecture | None, tuple[Fault, ...]]:
    fields = recipe.model.fields
    if fields is None:
        if unread & {"model", "model.config", "model.fields"}:
            return None, ()
        return None, (Fault("model.config", "nothing", "the path of a config.json"),)
    model, faults = arch.examine(fields)
    places = (Fault(f"model.fields.{f.where}", f.found, f.wanted, f.nearest) for f in faults)
    return model, tuple(places)


def _layout_relations(
    recipe: Recipe, world_size: int | None, readable: Callable[..., bool]
) -> Iterator[Fault]:
    optimizer, data = recipe.optimizer, recipe.data
    if readable("parallel.pp", "parallel.cp", "parallel.ep", "parallel.dp_shard"):
        data_ranks, faults = _data_ranks(recipe, world_size)
        yield from faults
        if readable("training.global_batch_size", "training.micro_batch_size"):
            batch_faults = _faults_of(lambda: recipe._batch(data_ranks))
            yield from batch_faults
            if not (faults or batch_faults) and readable("parallel.schedule"):
                yield from limits.table_size(
                    recipe.parallel.schedule,
                    pp=recipe.parallel.pp,
                    num_stages=recipe.parallel.num_stages,
                    batch=recipe.batch(world_size),
                )
    lengths = ("optimizer.warmup_steps", "optimizer.decay_steps", "training.steps")
    if readable("optimizer.schedule", *lengths):
        yield from limits.learning_rate(
            optimizer.schedule,
            steps=recipe.training.steps,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=optimizer.decay_steps,
            decay_shape=optimizer.decay_shape,
            min_lr_ratio=optimizer.min_lr_ratio,
        )
    if readable("validation.every", "data.validation") and (
        recipe.validation.every and not data.validation
    ):
        wanted = "0 where data.validation holds nothing out"
        yield Fault("validation.every", str(recipe.validation.every), wanted, ("0",))


def _data_ranks(recipe: Recipe, world_size: int | None) -> tuple[int, tuple[Fault, ...]]:
    """Data ranks of the mesh; where it is not whole, a number that surely divides them."""
    faults = _faults_of(lambda: recipe.mesh(world_size))
    if not faults:
        return recipe.mesh(world_size).num_data_ranks, ()
    axes = recipe.parallel
    dp, rest = divmod(world_size or 0, axes.pp * axes.cp * axes.ep)
    return axes.ep * (dp if dp and not rest else 1), faults


def _model_relations(
    recipe: Recipe, model: Architecture, readable: Callable[..., bool]
) -> Iterator[Fault]:
    axes, length = recipe.parallel, recipe.training.sequence_length
    if readable("parallel.ep", "model.fields.num_experts"):
        yield from limits.experts(model.num_experts, ep=axes.ep)
    if readable("training.sequence_length", "model.fields.max_position_embeddings"):
        cp = axes.cp if readable("parallel.cp") else 1
        yield from limits.sequence(length, cp=cp, max_length=model.max_position_embeddings)
    counts = ("parallel.pp", "parallel.num_stages", "parallel.layers_per_stage")
    if readable("model.fields.num_hidden_layers", *counts):
        yield from limits.stages(
            axes.schedule if readable("parallel.schedule") else None,
            pp=axes.pp,
            num_layers=model.num_layers,
            num_stages=axes.num_stages,
            layers_per_stage=axes.layers_per_stage,
        )
    if readable("data.corpus", "model.fields.vocab_size"):
        yield from limits.vocabulary(model.vocab_size, corpus=recipe.data.corpus)


def _faults_of(call: Callable[[], object]) -> tuple[Fault, ...]:
    try:
        call()
    except RequestError as error:
        return error.faults
    return ()
