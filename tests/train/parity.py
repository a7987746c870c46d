"""How tests compare a step of a run on any layout with the same step in one piece."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch
from pith.engine.clock import HostClock
from pith.schedule.table import slot_text
from pith.train.build import build
from pith.train.routing import StepRouting
from pith.train.step import StepResult, Trainer
from pith.verify import one_piece
from pith.verify.layout_run import closing, keep_gradients
from pith.verify.one_piece import Weights, Whole
from pith.verify.share import Share, joined, share

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=60)
SIZES = {
    "model_type": "qwen3_moe",
    "vocab_size": 261,  # divides by no number of ranks
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}


def recipe(
    *,
    pp: int,
    schedule: str,
    micro_batches: int,
    precision: str = "float64",
    ep: int = 1,
    dp: int = 1,
    dp_shard: int | None = None,
    exchange: str = "auto",
    num_stages: int | None = None,
    balance: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Recipe:
    """Micro-batches of two sequences of eight tokens, so many on each of dp * ep data ranks."""
    parallel = {"pp": pp, "ep": ep, "dp_shard": dp_shard, "schedule": schedule}
    parallel |= {"num_stages": num_stages, "exchange": exchange}
    raw = {
        "model": {"fields": SIZES | sizes},
        "parallel": parallel,
        "training": {
            "global_batch_size": 2 * micro_batches * dp * ep,
            "micro_batch_size": 2,
            "sequence_length": 8,
            "steps": 4,
            "precision": precision,
            "clip": 0.5,
        },
        "optimizer": {"lr": 0.01},
        "balance": {"coefficient": 0.05, **(balance or {})},
    }
    return Recipe.model_validate(raw, context={"world_size": pp * dp * ep})


def random_batch(num_sequences: int, *, seed: int = 0) -> Batch:
    """Labels masked unevenly: all of the first micro-batch, then ever fewer."""
    return one_piece.random_batch(num_sequences, length=8, vocab_size=260, seed=seed)


@dataclass
class Outcome:
    """What one rank knows after a step, or after several."""

    results: list[StepResult]
    grads: Share  # of the last step, before clipping
    weights: Share
    routing: StepRouting | None = field(default=None)

    @property
    def result(self) -> StepResult:
        return self.results[-1]


def new_trainer(
    recipe: Recipe, *, routing: StepRouting | None = None, sgd: bool = False
) -> Trainer:
    """The trainer of this rank through the production code."""
    world = World.joined(CPU, timeout=PATIENCE)
    model = build(recipe, world, headers=True)
    if sgd:
        masters = list(model.parameters.masters.values())
        model = replace(model, optimizer=torch.optim.SGD(masters, lr=recipe.optimizer.lr))
    return Trainer(recipe, world, model, routing=routing)


@contextmanager
def trainer_of(
    recipe: Recipe, *, routing: StepRouting | None = None, sgd: bool = False
) -> Iterator[Trainer]:
    """The same for as long as it is needed; its groups are closed at the end."""
    with closing(new_trainer(recipe, routing=routing, sgd=sgd)) as trainer:
        yield trainer


def steps(
    recipe: Recipe,
    batches: Sequence[Batch],
    *,
    routing: StepRouting | None = None,
    sgd: bool = False,
) -> Outcome:
    """This rank's share of a step on each of the global `batches`."""
    with trainer_of(recipe, routing=routing, sgd=sgd) as trainer:
        parameters = trainer.model.parameters
        kept = keep_gradients(parameters)
        results = []
        for index, batch in enumerate(batches):
            start = time.perf_counter()
            results.append(trainer.step(index, batch.take(trainer.rows), clock=HostClock()))
            assert_timed(results[-1], within=time.perf_counter() - start)
            row = trainer.model.table.rows[trainer.model.mesh.coordinates(trainer.world.rank).pp]
            executed = tuple(slot_text(slot) for slot in row)
            assert results[-1].slots == executed, "executed order and table differ"
        return Outcome(results, share(parameters, kept), weights_of(trainer), routing)


def assert_timed(result: StepResult, *, within: float) -> None:
    """Each slot that ran has its time, one after the other, in a step of so many seconds."""
    assert tuple(slot_text(span.slot) for span in result.spans) == result.slots
    times = [time for span in result.spans for time in (span.start, span.end)]
    assert times == sorted(times), "slots of a rank overlap"
    assert all(span.start < span.end for span in result.spans), "a slot took no time"
    assert 0 < times[0] < times[-1] < within, (times[0], times[-1], within)


def weights_of(trainer: Trainer) -> Share:
    parameters = trainer.model.parameters
    return share(parameters, parameters.masters)


def assert_near(found: Weights, wanted: Weights, *, tolerance: float, label: str) -> None:
    """Relative in the norm of each tensor; a tensor that should be zero is zero."""
    assert found.keys() == wanted.keys(), label
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, f"{label}: {name}"
        error, size = float((found[name] - tensor).norm()), float(tensor.norm())
        assert error <= tolerance * size, f"{label}: {name} off by {error} of {size}"


def assert_same_step(
    outcomes: Sequence[Outcome], whole: Whole, *, label: str, tolerance: float = 1e-10
) -> None:
    """All ranks report the loss, balance and norm of the whole batch, and hold its gradients.

    In float64; the promise is 1e-6 for the loss and 1e-5 for gradients, and far more is held.
    """
    for outcome in outcomes:
        result = outcome.result
        assert result.loss == pytest.approx(whole.loss, rel=1e-10, abs=0), label
        assert result.balance_loss == pytest.approx(whole.balance, rel=1e-10), label
        assert result.z_loss == pytest.approx(whole.z, rel=1e-10), label
        assert result.grad_norm == pytest.approx(whole.norm, rel=1e-10), label
        assert result.grad_norm == outcomes[0].result.grad_norm, f"{label}: ranks disagree"
        assert [list(row) for row in result.load_LE] == whole.load_LE, label
    grads = joined([outcome.grads for outcome in outcomes])
    assert_near(grads, whole.grads, tolerance=tolerance, label=label)
