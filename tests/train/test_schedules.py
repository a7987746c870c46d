"""One recipe is one run: every schedule and number of pipeline ranks computes the same step."""

from functools import cache
from typing import Any

import pytest
import torch

from pith.config import Recipe
from pith.schedule.build import SCHEDULES
from pith.verify.one_piece import Whole, initial, whole_batch
from tests.train.parity import Outcome, assert_same_step, random_batch, recipe, steps


def micro_batch_counts(pp: int) -> list[int]:
    """Too few for the ranks, as many as a V needs, more; on two ranks all that are near those."""
    near = {2, 3, 2 * pp - 1} if pp == 2 else set()
    return sorted({1, 2 * pp, 2 * pp + 3} | near)


def case(pp: int, schedule: str, micro_batches: int, **sizes: Any) -> Recipe:
    """On four ranks with layers enough for each stage of a V to hold something."""
    sizes = {"num_hidden_layers": 6 if pp == 4 else 4} | sizes
    return recipe(pp=pp, schedule=schedule, micro_batches=micro_batches, **sizes)


def one_case(pp: int, schedule: str, micro_batches: int, **sizes: Any) -> Outcome:
    return steps(case(pp, schedule, micro_batches, **sizes), [random_batch(2 * micro_batches)])


def assert_is_whole(outcomes: list[Outcome], wanted: Recipe, *, label: str) -> None:
    batch = random_batch(wanted.training.global_batch_size)
    assert_same_step(outcomes, whole_batch(wanted, initial(wanted), batch), label=label)


@cache
def whole(pp: int, micro_batches: int) -> Whole:
    """The step in one piece, which knows no schedule."""
    one = case(pp, "gpipe", micro_batches)
    return whole_batch(one, initial(one), random_batch(2 * micro_batches))


def many_cases(pp: int, counts: list[int], precision: str) -> dict[tuple[str, int], Any]:
    return {
        (schedule, count): one_case(pp, schedule, count, precision=precision)
        for schedule in SCHEDULES
        for count in counts
    }


def assert_same_bits(outcomes: list[dict[tuple[str, int], Outcome]], counts: list[int]) -> None:
    """Whatever the schedule, each gradient has the same bits."""
    for count in counts:
        gathered = [
            {
                name: grad
                for outcome in outcomes
                for name, grad in outcome[schedule, count].grads.tensors.items()
            }
            for schedule in SCHEDULES
        ]
        for schedule, grads in zip(SCHEDULES, gathered, strict=True):
            assert grads.keys() == gathered[0].keys()
            for name, grad in grads.items():
                assert torch.equal(grad, gathered[0][name]), f"{schedule} m {count}: {name}"


@pytest.mark.parametrize("pp", [3, 1, 2, 4])
def test_every_schedule_computes_the_step_of_one_process(run_ranks: Any, pp: int) -> None:
    counts = micro_batch_counts(pp)
    outcomes = run_ranks(pp, many_cases, pp, counts, "float64")
    for key in outcomes[0]:
        _, count = key
        results = [outcome[key] for outcome in outcomes]
        assert_same_step(results, whole(pp, count), label=f"pp {pp} {key}")
    assert_same_bits(outcomes, counts)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_gradients_are_bit_equal_across_schedules_in_float32(run_ranks: Any, pp: int) -> None:
    counts = [2 * pp + 3]
    assert_same_bits(run_ranks(pp, many_cases, pp, counts, "float32"), counts)


DEEP = {"num_stages": 6}


def deep_cases(pp: int) -> dict[str, Any]:
    """Three stages a rank on a loop and on a V; and what auto makes of a step too short for a V."""
    return {
        "interleaved": one_case(pp, "interleaved", 5, **DEEP),
        "list": one_case(pp, "list", 5, **DEEP),
        "auto": one_case(pp, "auto", 3),
    }


def test_more_stages_a_rank_and_auto_compute_the_same_step(run_ranks: Any) -> None:
    outcomes = run_ranks(2, deep_cases, 2)
    for schedule in outcomes[0]:
        count, sizes = (3, {}) if schedule == "auto" else (5, DEEP)
        results = [outcome[schedule] for outcome in outcomes]
        assert_is_whole(results, case(2, schedule, count, **sizes), label=schedule)


def tied_cases(pp: int) -> dict[str, Any]:
    schedules = ("1f1b", "zbv", "dualpipev")
    return {name: one_case(pp, name, 3, tie_word_embeddings=True) for name in schedules}


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_head_is_one_weight_on_loop_and_v_placements(run_ranks: Any, pp: int) -> None:
    outcomes = run_ranks(pp, tied_cases, pp)
    for schedule in outcomes[0]:
        results = [outcome[schedule] for outcome in outcomes]
        tied = case(pp, schedule, 3, tie_word_embeddings=True)
        assert_is_whole(results, tied, label=f"tied {schedule}")


ONE_LAYER = {"num_hidden_layers": 1, "mlp_only_layers": []}


def empty_cases(pp: int) -> dict[str, Any]:
    return {
        "gpipe": one_case(pp, "gpipe", 3, **ONE_LAYER),
        "zbv": steps(all_on_rank_0(), [random_batch(6)]),
    }


def all_on_rank_0() -> Recipe:
    """Stages 0 and 5 of a V hold everything; ranks 1 and 2 own no parameter."""
    tied = case(3, "zbv", 3, tie_word_embeddings=True)
    layers = (2, 0, 0, 0, 0, 2)
    parallel = tied.parallel.model_copy(update={"layers_per_stage": layers})
    return tied.model_copy(update={"parallel": parallel})


def test_ranks_that_own_no_parameter_pass_the_carry_on(run_ranks: Any) -> None:
    outcomes = run_ranks(3, empty_cases, 3)
    one_layer = case(3, "gpipe", 3, **ONE_LAYER)
    for key, whole_case in (("gpipe", one_layer), ("zbv", all_on_rank_0())):
        results = [outcome[key] for outcome in outcomes]
        assert not all(result.weights.tensors for result in results), "every rank owns something"
        assert_is_whole(results, whole_case, label=f"empty ranks {key}")
