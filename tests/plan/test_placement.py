"""The split places every layer once, and no other contiguous split has a smaller largest stage."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pith.errors import RequestError
from pith.plan.placement import split_layers

TABLE = [(layers, stages) for layers in (1, 2, 7, 30, 94) for stages in (1, 2, 3, 4, 8)]


def lengths(*args, **kwargs):
    return [len(layers) for layers in split_layers(*args, **kwargs)]


def every_split(num_layers, num_stages):
    for cuts in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield [edges[i + 1] - edges[i] for i in range(num_stages)]


def stage_costs(costs, split, first, last):
    loads, layer = [], 0
    for length in split:
        loads.append(sum(costs[layer : layer + length]))
        layer += length
    loads[0] += first
    loads[-1] += last
    return loads


@pytest.mark.parametrize(("num_layers", "num_stages"), TABLE)
def test_every_layer_is_placed_exactly_once(num_layers, num_stages):
    split = split_layers([1.0] * num_layers, num_stages=num_stages, last_cost=4.2)
    assert len(split) == num_stages
    assert [layer for layers in split for layer in layers] == list(range(num_layers))


@settings(max_examples=60, deadline=None)
@example(costs=[5, 9, 9, 0, 2, 8], num_stages=2, first=8, last=12)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    num_stages=st.integers(1, 4),
    first=st.integers(0, 12),
    last=st.integers(0, 12),
)
def test_no_other_split_is_better(costs, num_stages, first, last):
    """Least maximum, then least sum of squares: found by trying all."""
    found = lengths(costs, num_stages=num_stages, first_cost=first, last_cost=last)

    def key(split):
        loads = stage_costs(costs, split, first, last)
        return max(loads), sum(load**2 for load in loads), sum(n**2 for n in split)

    assert key(found) == min(map(key, every_split(len(costs), num_stages)))


def rank_costs(costs, split, first, last):
    loads = stage_costs(costs, split, first, last)
    return [loads[rank] + loads[-1 - rank] for rank in range(len(split) // 2)]


@settings(max_examples=60, deadline=None)
@example(num_layers=7, layer=1, num_ranks=3, first=0, last=4)
@given(
    num_layers=st.integers(1, 7),
    layer=st.integers(1, 9),
    num_ranks=st.integers(1, 3),
    first=st.integers(0, 12),
    last=st.integers(0, 30),
)
def test_no_other_split_of_equal_layers_on_a_v_has_a_smaller_largest_rank(
    num_layers, layer, num_ranks, first, last
):
    costs = [layer] * num_layers
    shape = {"num_stages": 2 * num_ranks, "first_cost": first, "last_cost": last}
    largest = max(rank_costs(costs, lengths(costs, folded=True, **shape), first, last))
    splits = every_split(num_layers, 2 * num_ranks)
    assert largest == min(max(rank_costs(costs, split, first, last)) for split in splits)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    num_ranks=st.integers(1, 6),
    first=st.integers(0, 12),
    last=st.integers(0, 60),
)
def test_on_a_v_no_rank_gets_more_than_even_stages_would_give_it(costs, num_ranks, first, last):
    shape = {"num_stages": 2 * num_ranks, "first_cost": first, "last_cost": last}
    folded = lengths(costs, folded=True, **shape)
    assert sum(folded) == len(costs)
    assert min(folded) >= 0
    even = lengths(costs, **shape)
    assert max(rank_costs(costs, folded, first, last)) <= max(rank_costs(costs, even, first, last))


def test_a_v_gives_the_rank_of_the_head_fewer_layers_at_both_ends():
    shape = {"num_stages": 16, "last_cost": 4.2}
    assert lengths([1.0] * 48, **shape) == [4, 4, 4, *[3] * 12, 0]  # ranks of 8.2, 7, 7 and six
    folded = lengths([1.0] * 48, folded=True, **shape)
    assert folded == [2, 4, 4, 4, 4, *[3] * 10, 0]  # ranks of 6.2, 7 and six


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(7, 2, [4, 3]), (7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (1, 1, [1])],
)
def test_ties_go_to_the_even_split_with_the_longer_stages_first(num_layers, num_stages, expected):
    assert lengths([0.1] * num_layers, num_stages=num_stages) == expected
    assert lengths([0.0] * num_layers, num_stages=num_stages) == expected


def test_edge_stages_get_fewer_layers():
    assert lengths([1.0] * 12, num_stages=4, first_cost=1.0, last_cost=3.0) == [3, 4, 4, 1]
    assert lengths([1.0] * 4, num_stages=3, last_cost=9.0) == [2, 2, 0]


def test_rounding_of_costs_decides_no_split():
    exact = lengths([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], num_stages=2)
    assert exact == [2, 2] == lengths([3e17, 3e17 + 64, 3e17, 3e17], num_stages=2)


def test_an_explicit_split_is_taken_as_it_is():
    assert lengths([1.0] * 5, num_stages=3, explicit=[5, 0, 0]) == [5, 0, 0]


@pytest.mark.parametrize("explicit", [[2, 2], [2, 2, 2], [6, -1, 0], [], [1, 1, 1, 2]])
def test_an_explicit_split_that_loses_or_adds_a_layer_is_refused(explicit):
    with pytest.raises(RequestError) as caught:
        split_layers([1.0] * 5, num_stages=3, explicit=explicit)
    assert caught.value.faults[0].where == "parallel.layers_per_stage"
    assert caught.value.faults[0].nearest == ("[2, 2, 1]",)
