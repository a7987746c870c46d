"""Experts that get everything, experts that get nothing, and memory that holds NaN."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.verify.layout_run import keep_gradients
from pith.verify.one_piece import Descent, Whole, clipped, initial, whole_batch
from pith.verify.share import joined, share
from tests.train.parity import Outcome, assert_same_step, random_batch, trainer_of, weights_of
from tests.train.test_parity import case

# Which experts the tokens go to in turn, of four; on two ranks each rank holds two of them.
EXTREMES = {
    "all on the first expert": [[0, 0]],
    "all on the last expert": [[3, 3]],
    "all on one rank": [[1, 0]],
    "first expert empty": [[1, 2], [2, 3], [3, 1]],
    "a middle expert empty": [[0, 1], [3, 0], [1, 3]],
    "last expert empty": [[0, 1], [2, 0], [1, 2]],
    "one token alone": [[3, 2]] + [[0, 1]] * 127,
}
LAYOUTS = {
    "ep 2": {"pp": 1, "ep": 2, "schedule": "1f1b-pair", "exchange": "collectives"},
    "ep 2, splits": {"pp": 1, "ep": 2, "schedule": "1f1b-pair", "exchange": "splits"},
    "pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipev", "exchange": "collectives"},
    "pp 2, ep 2, splits": {"pp": 2, "ep": 2, "schedule": "dualpipev", "exchange": "splits"},
    "dp 2, ep 2": {"pp": 1, "dp": 2, "ep": 2, "schedule": "zbv", "exchange": "splits"},
    "ep 4": {"pp": 1, "ep": 4, "schedule": "1f1b", "exchange": "collectives"},
    "ep 4, splits": {"pp": 1, "ep": 4, "schedule": "1f1b", "exchange": "splits"},
}
BATCHES = [random_batch(16, seed=seed) for seed in (0, 1)]


@dataclass(frozen=True)
class Forced:
    """Token t of the global batch goes to experts pattern[t mod its length]."""

    pattern: list[list[int]]
    name: str = "forced"

    def at(self, rows: slice) -> "Forced":
        starts = [
            token for row in range(rows.start, rows.stop) for token in range(8 * row, 8 * row + 8)
        ]
        return Forced([self.pattern[token % len(self.pattern)] for token in starts])

    def choose(self, layer: int, ids_TK: Tensor) -> Tensor:
        assert ids_TK.shape == (len(self.pattern), 2)
        return torch.tensor(self.pattern)


def a_step_of_each(ranks: int) -> dict[tuple[str, str], Outcome]:
    """One step after the other, so that each meets what the one before left in memory."""
    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    outcomes = {}
    for name, layout in LAYOUTS.items():
        if layout["pp"] * layout.get("dp", 1) * layout["ep"] != ranks:
            continue
        with trainer_of(case(layout)) as trainer:
            parameters = trainer.model.parameters
            grads = keep_gradients(parameters)
            for index, (extreme, pattern) in enumerate(EXTREMES.items()):
                trainer.routing = Forced(pattern)
                result = trainer.step(index, BATCHES[index % 2].take(trainer.rows))
                held = share(parameters, grads), weights_of(trainer)
                outcomes[name, extreme] = Outcome([result], *held)
    return outcomes


@cache
def wholes() -> dict[str, Whole]:
    """The same steps in one piece."""
    recipe = case(LAYOUTS["ep 2"])
    weights, found = initial(recipe), {}
    descent = Descent(recipe, weights)
    for index, (extreme, pattern) in enumerate(EXTREMES.items()):
        routing = Forced(pattern).at(slice(0, 16))
        whole = whole_batch(recipe, weights, BATCHES[index % 2], routing=routing)
        weights = descent.step(clipped(whole.grads, recipe.training.clip), lr=recipe.optimizer.lr)
        found[extreme] = whole
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_overfull_and_empty_experts_train_as_in_one_process(run_ranks: Any, ranks: int) -> None:
    outcomes = run_ranks(ranks, a_step_of_each, ranks)
    for name, extreme in outcomes[0]:
        label = f"{name}, {extreme}"
        shares = [outcome[name, extreme] for outcome in outcomes]
        assert_same_step(shares, wholes()[extreme], label=label)
        weights = joined([outcome.weights for outcome in shares])
        assert all(weight.isfinite().all() for weight in weights.values()), label
