"""The order of samples is a bijection in each epoch and knows nothing but (seed, n)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pith.data.order import sample_index


def indices(numbers: range | list[int], *, num_samples: int, seed: int = 0) -> list[int]:
    _, index = sample_index(np.array(numbers), num_samples=num_samples, seed=seed)
    return index.tolist()


@pytest.mark.parametrize("num_samples", [*range(1, 35), 127, 128, 129, 1000, 65537])
def test_each_epoch_takes_every_sample_once(num_samples: int) -> None:
    epoch, index = sample_index(np.arange(3 * num_samples), num_samples=num_samples, seed=5)
    for k in range(3):
        rows = slice(k * num_samples, (k + 1) * num_samples)
        assert (epoch[rows] == k).all()
        assert sorted(index[rows].tolist()) == list(range(num_samples))


@given(
    num_samples=st.integers(1, 2**40),
    seed=st.integers(-(2**70), 2**70),
    numbers=st.lists(st.integers(0, 2**50), min_size=1, max_size=8),
)
def test_a_sample_does_not_depend_on_its_neighbours(
    num_samples: int, seed: int, numbers: list[int]
) -> None:
    together = indices(numbers, num_samples=num_samples, seed=seed)
    alone = [indices([n], num_samples=num_samples, seed=seed)[0] for n in numbers]
    assert together == alone
    assert all(0 <= index < num_samples for index in together)


def test_epochs_and_seeds_are_ordered_differently_and_reproducibly() -> None:
    orders = {
        (seed, epoch): tuple(
            indices(range(epoch * 100, epoch * 100 + 100), num_samples=100, seed=seed)
        )
        for seed in (0, 1, 2**64 - 1)
        for epoch in range(5)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[1, 3] == tuple(indices(range(300, 400), num_samples=100, seed=1))


@pytest.mark.parametrize("num_samples", [7, 10, 64])
def test_every_sample_is_equally_likely_to_come_first_or_second(num_samples: int) -> None:
    num_epochs = 4000
    for place in (0, 1):
        numbers = list(range(place, num_epochs * num_samples, num_samples))
        counts = np.bincount(indices(numbers, num_samples=num_samples), minlength=num_samples)
        expected = num_epochs / num_samples
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        freedom = num_samples - 1
        assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_in_the_corpus_are_not_neighbours_in_the_run() -> None:
    order = np.array(indices(range(10_000), num_samples=10_000))
    following = np.count_nonzero(np.diff(order) == 1)
    assert following < 10  # about 1 in a random order
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.05


def test_the_order_is_part_of_the_format() -> None:
    """Changing it would break the resumption of every run that exists."""
    assert indices(range(10), num_samples=10, seed=0) == [7, 8, 2, 6, 9, 3, 0, 4, 5, 1]
    big = indices([0, 10**12, 2**62], num_samples=10**9 + 7, seed=1234)
    assert big == [432294469, 599022230, 575544761]
