"""One recipe is one run on every layout: pp, dp, ep, fsdp and hsdp, both exchanges."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.config import Recipe
from pith.schedule.build import SCHEDULES
from pith.train.routing import Recorder, Replay
from pith.verify.one_piece import Descent, Weights, Whole, clipped, initial, whole_batch
from pith.verify.share import joined
from tests.train.parity import (
    Outcome,
    assert_near,
    assert_same_step,
    random_batch,
    recipe,
    steps,
)

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "pp 1": {"pp": 1, "schedule": "1f1b-pair"},
    "pp 2": {"pp": 2, "schedule": "zbv"},
    "dp 2": {"pp": 1, "dp": 2, "schedule": "gpipe"},
    "dp 2, hsdp": {"pp": 1, "dp": 2, "dp_shard": 1, "schedule": "1f1b"},
    "ep 2": {"pp": 1, "ep": 2, "schedule": "1f1b-pair", "exchange": "collectives"},
    "ep 2, splits": {"pp": 1, "ep": 2, "schedule": "interleaved", "exchange": "splits"},
    "ep 4": {"pp": 1, "ep": 4, "schedule": "list", "exchange": "collectives"},
    "ep 4, splits": {"pp": 1, "ep": 4, "schedule": "1f1b", "exchange": "splits"},
    "pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipev", "exchange": "collectives"},
    "pp 2, ep 2, splits": {"pp": 2, "ep": 2, "schedule": "zbv", "exchange": "splits"},
    "pp 2, ep 2, splits, pairs": {
        "pp": 2,
        "ep": 2,
        "schedule": "1f1b-pair",
        "exchange": "splits",
    },
    "dp 2, ep 2": {"pp": 1, "dp": 2, "ep": 2, "schedule": "zb-h1"},
    "dp 2, ep 2, hsdp": {"pp": 1, "dp": 2, "ep": 2, "dp_shard": 1, "schedule": "dualpipev"},
    "dp 2, ep 2, splits": {
        "pp": 1,
        "dp": 2,
        "ep": 2,
        "schedule": "zb-h1",
        "exchange": "splits",
    },
    "dp 2, ep 2, hsdp, splits": {
        "pp": 1,
        "dp": 2,
        "ep": 2,
        "dp_shard": 1,
        "schedule": "gpipe",
        "exchange": "splits",
    },
    "pp 2, dp 2": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "pp 2, dp 2, gpipe": {"pp": 2, "dp": 2, "schedule": "gpipe"},
    "pp 2, dp 2, hsdp": {"pp": 2, "dp": 2, "dp_shard": 1, "schedule": "list"},
}


def num_ranks(layout: Mapping[str, Any]) -> int:
    return int(layout["pp"] * layout.get("dp", 1) * layout.get("ep", 1))


def of_size(ranks: int) -> dict[str, dict[str, Any]]:
    return {name: layout for name, layout in LAYOUTS.items() if num_ranks(layout) == ranks}


def case(layout: Mapping[str, Any], **changes: Any) -> Recipe:
    """Sixteen sequences a step on every layout."""
    data_ranks = layout.get("dp", 1) * layout.get("ep", 1)
    changes.setdefault("micro_batches", 16 // (2 * data_ranks))
    return recipe(**{**layout, **changes})


@cache
def reference() -> Whole:
    single = case(LAYOUTS["pp 1"])
    return whole_batch(single, initial(single), random_batch(16))


def test_the_layouts_run_every_schedule_at_least_twice() -> None:
    ran = [layout["schedule"] for layout in LAYOUTS.values()]
    assert all(ran.count(schedule) >= 2 for schedule in SCHEDULES)


# One step


# What an optimizer is given shows its scale under SGD alone: on these layouts besides.
BY_SGD = ("pp 1", "pp 2", "dp 2", "ep 2, splits", "pp 2, ep 2", "dp 2, ep 2, hsdp")


def optimizers(name: str) -> tuple[str, ...]:
    return ("adamw", "sgd") if name in BY_SGD else ("adamw",)


def one_step_each(ranks: int) -> dict[tuple[str, str], Outcome]:
    return {
        (name, optimizer): steps(case(layout), [random_batch(16)], sgd=optimizer == "sgd")
        for name, layout in of_size(ranks).items()
        for optimizer in optimizers(name)
    }


def moves(grads: Weights, *, sgd: bool) -> Weights:
    """How far a step of torch's optimizer on these gradients of the whole moves the weights."""
    single = case(LAYOUTS["pp 1"])
    lr, start = single.optimizer.lr, initial(single)
    given = clipped(grads, single.training.clip)
    if sgd:
        return {name: -lr * grad for name, grad in given.items()}
    after = Descent(single, start).step(given, lr=lr)
    return {name: after[name] - start[name] for name in start}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_computes_the_step_of_one_process(run_ranks: Any, ranks: int) -> None:
    outcomes = run_ranks(ranks, one_step_each, ranks)
    start = initial(case(LAYOUTS["pp 1"]))
    assert reference().norm > 0.5, "clipping should bite"
    assert {name for name, _ in outcomes[0]} == set(of_size(ranks))
    for name, optimizer in outcomes[0]:
        label = f"{name}, {optimizer}"
        shares = [outcome[name, optimizer] for outcome in outcomes]
        assert_same_step(shares, reference(), label=label)
        weights = joined([outcome.weights for outcome in shares])
        moved = {key: weights[key] - start[key] for key in start}
        wanted = moves(reference().grads, sgd=optimizer == "sgd")
        assert_near(moved, wanted, tolerance=1e-9, label=label)


def test_a_gradient_summed_as_often_as_there_are_expert_ranks_would_be_seen() -> None:
    """The comparison above rejects the classic fault: expert gradients ep times too large."""
    whole = reference()
    twice = {name: 2 * grad if ".experts." in name else grad for name, grad in whole.grads.items()}
    with pytest.raises(AssertionError, match="experts"):
        assert_near(twice, whole.grads, tolerance=1e-5, label="doubled")
    moved = moves(twice, sgd=True)
    with pytest.raises(AssertionError):
        assert_near(moved, moves(whole.grads, sgd=True), tolerance=1e-9, label="doubled")


# Tied weights


TIED = {
    name: LAYOUTS[name]
    for name in ("dp 2", "pp 2", "dp 2, ep 2, hsdp", "pp 2, dp 2", "pp 2, dp 2, hsdp")
}


def tied_steps(ranks: int) -> dict[str, Outcome]:
    return {
        name: steps(case(layout, tie_word_embeddings=True), [random_batch(16)])
        for name, layout in TIED.items()
        if num_ranks(layout) == ranks
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tied_head_is_one_weight_under_sharding(run_ranks: Any, ranks: int) -> None:
    outcomes = run_ranks(ranks, tied_steps, ranks)
    single = case(LAYOUTS["pp 1"], tie_word_embeddings=True)
    whole = whole_batch(single, initial(single), random_batch(16))
    for name in outcomes[0]:
        shares = [outcome[name] for outcome in outcomes]
        assert_same_step(shares, whole, label=f"tied, {name}")
        joined([outcome.weights for outcome in shares])


# Router losses


SCOPES = ("sequence", "micro-batch", "global-batch", "none")
CUT = ("micro-batch", "global-batch")  # these depend on where the batch is cut
SPREAD = {
    "ep 2": SCOPES,
    "dp 2": CUT,
    "pp 2, ep 2": SCOPES,
    "pp 2, dp 2, hsdp": CUT,
    "dp 2, ep 2, hsdp": CUT,
    "ep 4, splits": CUT,
}


def scoped(layout: Mapping[str, Any], scope: str) -> Recipe:
    return case(layout, balance={"scope": scope, "coefficient": 0.3, "z_loss": 0.02})


def scope_steps(ranks: int) -> dict[tuple[str, str], Outcome]:
    return {
        (name, scope): steps(scoped(LAYOUTS[name], scope), [random_batch(16)])
        for name, scopes in SPREAD.items()
        if num_ranks(LAYOUTS[name]) == ranks
        for scope in scopes
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_balance_scopes_and_z_loss_are_those_of_the_same_cut_in_one_process(
    run_ranks: Any, ranks: int
) -> None:
    outcomes = run_ranks(ranks, scope_steps, ranks)
    for name, scope in outcomes[0]:
        one = scoped(LAYOUTS[name], scope)
        whole = whole_batch(one, initial(one), random_batch(16), world_size=ranks)
        shares = [outcome[name, scope] for outcome in outcomes]
        assert_same_step(shares, whole, label=f"{name}, {scope}")


# Replaced routing


def recorded(ranks: int) -> dict[str, Outcome]:
    return {
        name: steps(
            case(layout, precision="float32"), [random_batch(16)], routing=Recorder(16, length=8)
        )
        for name, layout in of_size(ranks).items()
    }


def replayed(ranks: int, choices: dict[int, Tensor]) -> dict[str, Outcome]:
    return {
        name: steps(case(layout, precision="float32"), [random_batch(16)], routing=Replay(choices))
        for name, layout in of_size(ranks).items()
    }


def test_float32_layouts_agree_where_one_replays_the_routing_of_the_other(run_ranks: Any) -> None:
    [single] = run_ranks(1, recorded, 1)
    recorder = single["pp 1"].routing
    whole_grads = joined([single["pp 1"].grads])
    outcomes = run_ranks(4, replayed, 4, recorder.choices)
    for name in of_size(4):
        shares = [outcome[name] for outcome in outcomes]
        for outcome in shares:
            assert outcome.result.loss == pytest.approx(single["pp 1"].result.loss, rel=1e-6), name
            assert outcome.result.load_LE == single["pp 1"].result.load_LE, name
        grads = joined([outcome.grads for outcome in shares])
        assert_near(grads, whole_grads, tolerance=1e-5, label=f"float32, {name}")


# Bits


SAME_CUT = SCHEDULES


def same_cut_steps() -> dict[str, Outcome]:
    layout = LAYOUTS["pp 2, ep 2"]
    return {
        schedule: steps(
            case(layout | {"schedule": schedule}, precision="float32"), [random_batch(16)]
        )
        for schedule in SAME_CUT
    }


def test_schedules_give_the_same_bits_also_with_experts_spread_out(run_ranks: Any) -> None:
    outcomes = run_ranks(4, same_cut_steps)
    grads = {
        schedule: joined([outcome[schedule].grads for outcome in outcomes]) for schedule in SAME_CUT
    }
    for schedule in SAME_CUT:
        for name, grad in grads["1f1b"].items():
            assert torch.equal(grads[schedule][name], grad), f"{schedule}: {name}"
