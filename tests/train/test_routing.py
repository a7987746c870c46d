"""A step's routing is recorded, replayed exactly or refused, and balanced whatever the sizes."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.train.routing import Balanced, Recorder, Replay, far_apart, merge
from tests.train.parity import SIZES as MODEL
from tests.train.parity import random_batch, recipe, steps, trainer_of

NUM_SEQUENCES, LENGTH, TOP_K = 6, 5, 3


@pytest.fixture
def chosen() -> Tensor:
    """What the routers of one layer choose for a whole global batch [N, S, K]."""
    scores = torch.rand(NUM_SEQUENCES, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    return scores.topk(TOP_K).indices


def record(choices: dict[int, Tensor], *rows: slice) -> Recorder:
    """A recorder that saw these rows of these layers."""
    recorder = Recorder(NUM_SEQUENCES, length=LENGTH)
    for layer, part in product(choices, rows):
        ids_TK = choices[layer][part].flatten(0, 1)
        assert recorder.at(part).choose(layer, ids_TK) is ids_TK
    return recorder


def test_recordings_of_several_ranks_join_and_replay_in_any_cut(chosen: Tensor) -> None:
    whole = {0: chosen, 1: 7 - chosen, 2: chosen.flip(0)}
    early, late = {0: whole[0], 1: whole[1]}, {2: whole[2]}  # two pipeline ranks
    recorders = [
        record(early, slice(2, 4), slice(0, 2)),
        record(early, slice(4, 6)),
        record(late, slice(0, 3)),
        record(late, slice(2, 6)),
    ]
    assert recorders[0].choices[0][4:].eq(-1).all()
    merged = merge(recorder.choices for recorder in recorders)
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[layer], whole[layer]) for layer in whole)

    replay = Replay(merged)
    for layer, size in product(whole, (1, 2, 3, 6)):
        for start in range(0, NUM_SEQUENCES, size):
            rows = slice(start, start + size)
            own_TK = torch.zeros(size * LENGTH, TOP_K, dtype=torch.int64)
            found_TK = replay.at(rows).choose(layer, own_TK)
            assert torch.equal(found_TK, whole[layer][rows].flatten(0, 1))
    assert (recorders[0].name, replay.name, Balanced(4).name) == (
        "recorded",
        "replayed",
        "balanced",
    )


def test_recordings_that_differ_in_one_token_do_not_join(chosen: Tensor) -> None:
    other_NSK = chosen.clone()
    other_NSK[3, 1] = other_NSK[3, 1].flip(0)
    recorded = [record({4: ids}, slice(2, 4)).choices for ids in (chosen, other_NSK)]
    with pytest.raises(AssertionError, match="layer 4: two recordings of one token differ"):
        merge(recorded)


@pytest.mark.parametrize(
    ("layer", "rows", "shape", "message"),
    [
        (1, slice(0, 2), (10, 3), r"layer 1, .*only layers \[0\] were recorded"),
        (0, slice(0, 2), (10, 2), r"choices \(10, 3\) were recorded, \(10, 2\) are asked for"),
        (0, slice(0, 2), (8, 3), r"choices \(10, 3\) were recorded, \(8, 3\) are asked for"),
        (0, slice(5, 7), (10, 3), r"sequences 5 to 7: choices \(5, 3\) were recorded"),
        (0, slice(3, 5), (10, 3), r"sequences 3 to 5: some choices were not recorded"),
    ],
    ids=["layer", "top-k", "length", "batch", "unseen"],
)
def test_a_step_of_other_sizes_is_not_replayed(
    chosen: Tensor, layer: int, rows: slice, shape: tuple[int, int], message: str
) -> None:
    recorder = record({0: chosen}, slice(0, 4), slice(5, 6))
    own_TK = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(AssertionError, match=message):
        Replay(recorder.choices).at(rows).choose(layer, own_TK)


@pytest.mark.parametrize("shape", [(12, TOP_K), (20, TOP_K)])
def test_a_recorder_refuses_tokens_that_are_not_whole_rows(shape: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError):
        Recorder(NUM_SEQUENCES, length=LENGTH).at(slice(0, 2)).choose(0, torch.zeros(shape).long())


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


SIZES = [(1, 1), (2, 1), (4, 3), (5, 5), (6, 4), (7, 3), (8, 3), (60, 4), (96, 6), (128, 8)]


@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("length", [1, 5, 64])
def test_balanced_choices_are_distinct_and_even_over_experts_and_ranks(
    num_experts: int, top_k: int, length: int
) -> None:
    balanced, whole = Balanced(num_experts), Counter()
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        own_TK = torch.zeros(2 * length, top_k, dtype=torch.int64)
        ids_TK = balanced.at(rows).choose(0, own_TK)
        assert ids_TK.dtype == torch.int64
        assert ids_TK.shape == own_TK.shape
        assert torch.equal(ids_TK, balanced.at(rows).choose(9, own_TK + 1))
        assert all(len(set(ids)) == top_k for ids in ids_TK.tolist())
        load = ids_TK.flatten().bincount(minlength=num_experts)
        assert len(load) == num_experts
        assert spread(load.tolist()) <= 1
        for ep in (2, 4, 8):
            if num_experts % ep == 0:
                assert spread(load.view(ep, -1).sum(1).tolist()) <= 1
        whole.update(ids_TK.flatten().tolist())
    assert spread([whole[e] for e in range(num_experts)]) <= 1


def test_a_token_of_balanced_routing_visits_as_many_ranks_as_it_can() -> None:
    ids_TK = Balanced(128).at(slice(0, 1)).choose(0, torch.zeros(32, 8, dtype=torch.int64))
    assert all(len({expert // 16 for expert in ids}) == 8 for ids in ids_TK.tolist())


def test_the_order_names_every_expert_once() -> None:
    assert far_apart(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    for num_experts in range(1, 130):
        assert sorted(far_apart(num_experts)) == list(range(num_experts))


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 1, "schedule": "1f1b", "micro_batches": 8},
    {"pp": 2, "schedule": "dualpipev", "micro_batches": 8},
    {"pp": 1, "ep": 2, "schedule": "1f1b-pair", "micro_batches": 4, "exchange": "collectives"},
    {"pp": 1, "ep": 2, "schedule": "zbv", "micro_batches": 4, "exchange": "splits"},
]


def loads_of_steps(ranks: int) -> list[tuple[tuple[tuple[int, ...], ...], ...]]:
    """Counts per layer and expert of a step with balanced routing and of one as learned."""
    return [
        tuple(
            steps(recipe(**layout), [random_batch(16)], routing=routing).result.load_LE
            for routing in (Balanced(4), None)
        )
        for layout in LAYOUTS
        if layout["pp"] * layout.get("ep", 1) == ranks
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_balanced_routing_gives_every_expert_the_same_load_in_a_step_of_any_layout(
    run_ranks: Any, ranks: int
) -> None:
    num_pairs = 16 * 8 * 2  # tokens and top-k
    even = [
        [num_pairs // 4] * 4 if layer not in MODEL["mlp_only_layers"] else [0] * 4
        for layer in range(MODEL["num_hidden_layers"])
    ]
    for outcome in run_ranks(ranks, loads_of_steps, ranks):
        for balanced, learned in outcome:
            assert [list(row) for row in balanced] == even
            assert [sum(row) for row in learned] == [sum(row) for row in even]
            assert [list(row) for row in learned] != even, "routers should choose unevenly here"


def evaluations() -> list[float]:
    """The loss of one batch without replaced routing, and with it."""
    totals = []
    for routing in (None, Balanced(4)):
        with trainer_of(recipe(**LAYOUTS[0]), routing=routing) as trainer:
            totals.append(trainer.evaluate(random_batch(16)))
    return totals


def test_evaluation_goes_where_the_routers_say(run_ranks: Any) -> None:
    [[learned, balanced]] = run_ranks(1, evaluations)
    assert balanced == learned
