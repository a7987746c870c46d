"""One recipe is one run: every schedule and number of pipeline ranks computes the same step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch
from pith.ops.cross_entropy import NOT_COUNTED
from pith.schedule.build import SCHEDULES
from pith.schedule.table import slot_text
from pith.train.build import build
from pith.train.step import StepResult, Trainer
from tests.train.one_piece import initial, whole_batch

CPU = torch.device("cpu")
SIZES = {
    "model_type": "qwen3_moe",
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 6,
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
    *, pp: int, schedule: str, micro_batches: int, precision: str = "float64", **sizes: Any
) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"fields": SIZES | sizes},
            "parallel": {"pp": pp, "schedule": schedule},
            "training": {
                "global_batch_size": 2 * micro_batches,
                "micro_batch_size": 2,
                "sequence_length": 8,
                "steps": 4,
                "precision": precision,
                "clip": 0.5,
            },
            "optimizer": {"lr": 0.01},
            "balance": {"coefficient": 0.05},
        }
    )


def random_batch(num_sequences: int, *, seed: int = 0) -> Batch:
    """Labels masked unevenly: all of the first micro-batch, then ever fewer."""
    draw = np.random.default_rng(seed)
    tokens_NS = draw.integers(0, 260, (num_sequences, 8))
    labels_NS = draw.integers(0, 260, (num_sequences, 8))
    for row in range(2, num_sequences):
        labels_NS[row, : max(0, 7 - row)] = NOT_COUNTED
    if num_sequences > 2:
        labels_NS[:2] = NOT_COUNTED
    return Batch(tokens_NS, labels_NS, np.arange(num_sequences))


def engine_step(recipe: Recipe, batch: Batch) -> tuple[StepResult, dict[str, Tensor]]:
    """The same step through the production code, as this rank's share of it."""
    world = World.joined(CPU)
    trainer = Trainer(recipe, world, build(recipe, world, headers=True))
    reduced: dict[str, Tensor] = {}
    reduce = trainer.model.parameters.reduce

    def keep(*, scale: float) -> Mapping[str, Tensor]:
        grads = reduce(scale=scale)
        reduced.update({name: grads[name].clone() for name in grads})
        return grads

    trainer.model.parameters.reduce = keep
    result = trainer.step(0, batch)
    row = trainer.model.table.rows[trainer.world.rank]
    assert result.slots == tuple(slot_text(slot) for slot in row), "executed order and table differ"
    return result, reduced


def assert_same_step(
    results: list[tuple[StepResult, dict[str, Tensor]]], recipe: Recipe, batch: Batch, *, label: str
) -> None:
    whole = whole_batch(recipe, initial(recipe), batch)
    loss, grads = whole.loss, whole.grads
    found: dict[str, Tensor] = {}
    for result, share in results:
        assert result.loss == pytest.approx(loss, rel=1e-6), label
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6), label
        assert result.grad_norm == results[0][0].grad_norm, f"{label}: ranks disagree"
        for name, grad in share.items():
            if name in found:
                assert torch.equal(found[name], grad), f"{label}: copies of {name} differ"
            found[name] = grad
    assert found.keys() == grads.keys(), label
    for name, grad in grads.items():
        error = float((found[name] - grad).norm())
        assert error <= 1e-5 * float(grad.norm()), f"{label}: {name} off by {error}"


def micro_batch_counts(pp: int) -> list[int]:
    return sorted({1, 2, 3, 2 * pp - 1, 2 * pp, 2 * pp + 3})


def one_case(pp: int, schedule: str, micro_batches: int, sizes: dict[str, Any]) -> Any:
    case = recipe(pp=pp, schedule=schedule, micro_batches=micro_batches, **sizes)
    return engine_step(case, random_batch(2 * micro_batches))


def many_cases(pp: int, sizes: dict[str, Any]) -> dict[tuple[str, int], Any]:
    return {
        (schedule, count): one_case(pp, schedule, count, sizes)
        for schedule in SCHEDULES
        for count in micro_batch_counts(pp)
    }


@pytest.mark.parametrize("pp", [3, 1, 2, 4])
def test_every_schedule_computes_the_step_of_one_process(run_ranks: Any, pp: int) -> None:
    outcomes = run_ranks(pp, many_cases, pp, {})
    for key in outcomes[0]:
        schedule, count = key
        case = recipe(pp=pp, schedule=schedule, micro_batches=count)
        results = [outcome[key] for outcome in outcomes]
        assert_same_step(results, case, random_batch(2 * count), label=f"pp {pp} {key}")


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_gradients_are_bit_equal_across_schedules_in_float32(run_ranks: Any, pp: int) -> None:
    outcomes = run_ranks(pp, many_cases, pp, {"precision": "float32"})
    for count in micro_batch_counts(pp):
        gathered = [
            {
                name: grad
                for outcome in outcomes
                for name, grad in outcome[schedule, count][1].items()
            }
            for schedule in SCHEDULES
        ]
        for schedule, grads in zip(SCHEDULES, gathered, strict=True):
            assert grads.keys() == gathered[0].keys()
            for name, grad in grads.items():
                assert torch.equal(grad, gathered[0][name]), f"{schedule} m {count}: {name}"


def tied_cases(pp: int) -> dict[str, Any]:
    sizes = {"tie_word_embeddings": True}
    return {schedule: one_case(pp, schedule, 3, sizes) for schedule in ("1f1b", "zbv", "dualpipev")}


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_head_is_one_weight_on_loop_and_v_placements(run_ranks: Any, pp: int) -> None:
    outcomes = run_ranks(pp, tied_cases, pp)
    for schedule in outcomes[0]:
        case = recipe(pp=pp, schedule=schedule, micro_batches=3, tie_word_embeddings=True)
        results = [outcome[schedule] for outcome in outcomes]
        assert_same_step(results, case, random_batch(6), label=f"tied {schedule}")


ONE_LAYER = {"num_hidden_layers": 1, "mlp_only_layers": []}


def empty_cases(pp: int) -> dict[str, Any]:
    return {
        "gpipe": engine_step(
            recipe(pp=pp, schedule="gpipe", micro_batches=3, **ONE_LAYER),
            random_batch(6),
        ),
        "zbv": engine_step(all_on_rank_0(), random_batch(6)),
    }


def all_on_rank_0() -> Recipe:
    """Stages 0 and 5 of a V hold everything; ranks 1 and 2 own no parameter."""
    case = recipe(pp=3, schedule="zbv", micro_batches=3, tie_word_embeddings=True)
    layers = (2, 0, 0, 0, 0, 4)
    parallel = case.parallel.model_copy(update={"layers_per_stage": layers})
    return case.model_copy(update={"parallel": parallel})


def test_ranks_that_own_no_parameter_pass_the_carry_on(run_ranks: Any) -> None:
    outcomes = run_ranks(3, empty_cases, 3)
    one_layer = recipe(pp=3, schedule="gpipe", micro_batches=3, **ONE_LAYER)
    for key, case in (("gpipe", one_layer), ("zbv", all_on_rank_0())):
        results = [outcome[key] for outcome in outcomes]
        assert not all(share for _, share in results), "every rank owns something"
        assert_same_step(results, case, random_batch(6), label=f"empty ranks {key}")
