"""The tables of a recipe, each a frozen, strictly typed value."""

import os
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
)
from pydantic_core import PydanticCustomError

from pith.schedule.build import SCHEDULES

T = TypeVar("T")


def _none(value: Any) -> Any:
    """TOML has no null: the word none stands for it."""
    return None if value == "none" else value


def _only_zero(value: float) -> float:
    if value:
        raise PydanticCustomError("not_built", "0: anything else is not implemented yet")
    return value


def _file_name(path: str) -> str:
    """What every file system takes: no control character, no part beyond 255 bytes."""
    if not path.isprintable():
        raise PydanticCustomError("file_name", "a path without control characters")
    if max(map(len, os.fsencode(path).split(b"/"))) > 255 or len(os.fsencode(path)) >= 4096:
        raise PydanticCustomError("file_name", "a path of names up to 255 bytes, 4095 in all")
    return path


def _known_schedule(name: str) -> str:
    if name not in SCHEDULE_NAMES:
        choices = ", ".join(f"'{choice}'" for choice in SCHEDULE_NAMES)
        raise PydanticCustomError("literal_error", "one of {expected}", {"expected": choices})
    return name


SCHEDULE_NAMES = ("auto", *SCHEDULES)
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0, le=1e38)]  # float32 holds it
Weight = Annotated[float, Field(ge=0, le=1e6)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_file_name)]
ScheduleName = Annotated[
    str, AfterValidator(_known_schedule), Field(json_schema_extra={"enum": list(SCHEDULE_NAMES)})
]
NotBuilt = Annotated[float, AfterValidator(_only_zero), Field(json_schema_extra={"const": 0})]
Maybe = Annotated[T | None, BeforeValidator(_none)]


class Section(BaseModel):
    """A table of the recipe: frozen, strictly typed, no unknown key, no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model. A file names `config`, a Hugging Face config.json beside it; `fields` changes
    single keys of it. A loaded recipe has everything in `fields`."""

    config: Maybe[PathText] = None
    fields: dict[str, JsonValue] | None = None


class DataSection(Section):
    """What is read. `corpus`: "embedded", a tokenized folder or a text file; `validation`: the
    share of documents held out; `packing` mask: a label across a document end is not counted;
    `epochs` bounds how often the corpus is read."""

    corpus: PathText = "embedded"
    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    packing: Literal["none", "mask"] = "none"
    seed: Seed = 0
    epochs: Maybe[Count] = None


class ParallelSection(Section):
    """Ranks per axis (dp is what is left of the world), and the pipeline's schedule and split.

    `dp_shard` ranks of dp share one copy of the weights, all of them unless it is set (fewer is
    hsdp). `exchange` moves tokens to their experts: every token to every ep rank (collectives) or
    only where it is needed (splits); auto takes collectives up to ep 4."""

    pp: Count = 1
    cp: Count = 1
    ep: Count = 1
    dp_shard: Maybe[Count] = None
    schedule: ScheduleName = "auto"
    num_stages: Maybe[Count] = None
    layers_per_stage: Maybe[Annotated[tuple[Number, ...], Strict(False)]] = None
    exchange: Literal["auto", "collectives", "splits"] = "auto"


class TrainingSection(Section):
    """The run. Batch sizes are in sequences; `clip` bounds the gradient norm; `max_skips` is the
    most consecutive steps that `non_finite` skip leaves out."""

    global_batch_size: Annotated[Count, Field(examples=[16])]
    micro_batch_size: Count = 1
    sequence_length: Annotated[Count, Field(examples=[256])]
    steps: Annotated[Count, Field(examples=[100])]
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    recompute: Literal["none"] = "none"
    clip: Annotated[
        Maybe[Positive],
        Field(json_schema_extra={"anyOf": [{"type": "number"}, {"const": "none"}]}),
    ] = 1.0
    seed: Seed = 0
    deterministic: bool = False
    non_finite: Literal["stop", "skip"] = "stop"
    max_skips: Count = 10


class OptimizerSection(Section):
    """AdamW, and the learning rate as a function of the step. `decay_*` are read by wsd."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[Positive, Field(examples=[3e-4])]
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Weight = 0.1
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: Number = 0
    decay_steps: Number = 0
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    min_lr_ratio: Ratio = 0.0


class BalanceSection(Section):
    """The auxiliary losses of the router: `coefficient` weighs the load-balance loss, over each
    sequence, each micro-batch or the global batch; `z_loss` weighs the squared log-sum of logits.
    """

    scope: Literal["sequence", "micro-batch", "global-batch", "none"] = "sequence"
    coefficient: Weight = 0.001
    z_loss: Weight = 0.0
    bias_update: NotBuilt = 0.0


class CheckpointSection(Section):
    """What is saved: every so many steps (0: only after the last one), the newest `keep` of them
    (0: all), in `directory` or the run folder. `asynchronous` lets training go on while
    bytes are written; `verify` compares checksums on resume, without it only sizes."""

    every: Number = 500
    keep: Number = 2
    directory: Maybe[PathText] = None
    asynchronous: bool = False
    verify: bool = True


class ValidationSection(Section):
    """The held-out loss: `every` so many steps (0: only at the end), on `num_sequences`."""

    every: Number = 0
    num_sequences: Count = 64


class LogSection(Section):
    """A line every so many steps; run folders are made in `directory`. `trace_steps` are the steps
    whose executed order and times go to trace/, counted from 1 at the first step that a process
    takes: a resumed run counts anew."""

    every: Count = 1
    directory: PathText = "runs"
    trace_steps: Annotated[tuple[Count, ...], Strict(False)] = (1, 3)
