"""Sample n of a run is a pure function of (seed, n): no stored index, no state to resume.

Each epoch is a permutation of `range(num_samples)` made by a Feistel network (Luby and Rackoff,
1988) over the smallest power of two that holds the range; values that fall outside are sent
through the network again until they fall inside (cycle walking; Black and Rogaway, 2002).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_NUM_ROUNDS = 8  # even, so that the two halves end with the widths they started with


def sample_index(n: Integers, *, num_samples: int, seed: int) -> tuple[Integers, Integers]:
    """(epoch [N], index [N] in range(num_samples)) of the samples `n` [N] of a run.

    Over each epoch the index takes every value once; epochs are ordered differently.
    """
    assert num_samples > 0
    n = np.asarray(n, dtype=np.int64)
    epoch = n // num_samples
    start = _mix(np.full(1, seed % 2**64, dtype=np.uint64))
    keys = _mix(start ^ epoch.astype(np.uint64))
    value = (n % num_samples).astype(np.uint64)
    outside = np.ones(value.shape, dtype=bool)
    while outside.any():
        value[outside] = _feistel(value[outside], keys[outside], num_values=num_samples)
        outside = value >= num_samples
    return epoch, value.astype(np.int64)


def _feistel(value: _Words, keys: _Words, *, num_values: int) -> _Words:
    """One pass through the network: a bijection on range(2**bits), with one key for each value."""
    bits = max(2, (num_values - 1).bit_length())
    low_bits, high_bits = bits // 2, bits - bits // 2
    high, low = value >> np.uint64(low_bits), value & _mask(low_bits)
    for round_number in range(_NUM_ROUNDS):
        noise = _mix(_mix(keys + np.uint64(round_number)) ^ low)
        high, low = low, (high ^ noise) & _mask(high_bits)
        low_bits, high_bits = high_bits, low_bits
    return (high << np.uint64(low_bits)) | low


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each bit in moves each bit out."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
