"""The learning rate at every corner of every schedule, against values worked out by hand."""

import math

import pytest

from pith.train.learning_rate import learning_rate


def rate(step, **changes):
    recipe = {
        "peak": 1.0,
        "schedule": "wsd",
        "warmup_steps": 4,
        "decay_steps": 4,
        "decay_shape": "linear",
        "min_ratio": 0.2,
        "total_steps": 12,
    }
    return learning_rate(step, **(recipe | changes))


def all_rates(**changes):
    return [rate(step, **changes) for step in range(12)]


WARM_UP = [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_the_peak_after_the_warm_up():
    assert all_rates(schedule="constant") == [*WARM_UP, *[1.0] * 8]


def test_linear_decay_ends_at_the_floor():
    wanted = [*WARM_UP, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert all_rates() == pytest.approx(wanted, abs=1e-15)


def test_one_minus_square_root_decay():
    wanted = [0.2 + 0.8 * left for left in (0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0)]
    assert all_rates(decay_shape="1-sqrt")[8:] == pytest.approx(wanted, abs=1e-15)


def test_cosine_decay():
    root = math.sqrt(0.5)
    wanted = [0.2 + 0.4 * (1 + cosine) for cosine in (root, 0, -root, -1)]
    assert all_rates(decay_shape="cosine")[8:] == pytest.approx(wanted, abs=1e-15)


def test_cosine_schedule_runs_from_the_warm_up_to_the_last_step():
    found = all_rates(schedule="cosine", decay_steps=1, decay_shape="linear")
    assert found[:4] == WARM_UP
    assert found[5] == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)), abs=1e-15)
    assert found[7] == pytest.approx(0.6, abs=1e-15)
    assert found[11] == pytest.approx(0.2, abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_without_warm_up_and_decay_the_first_step_is_no_division_by_zero(schedule):
    found = rate(0, schedule=schedule, warmup_steps=0, decay_steps=0, total_steps=1)
    assert found == (pytest.approx(0.2) if schedule == "cosine" else 1.0)


def test_decay_longer_than_the_run_starts_after_the_warm_up():
    wanted = [*WARM_UP, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    assert all_rates(decay_steps=100) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_steps_after_the_last_stay_at_the_floor(schedule):
    assert rate(40, schedule=schedule) == pytest.approx(0.2, abs=1e-15)


def test_the_rate_scales_with_the_peak():
    assert all_rates(peak=3e-4) == pytest.approx([3e-4 * r for r in all_rates()], rel=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_resumed_run_sees_the_same_bits(schedule):
    whole = [value.hex() for value in all_rates(schedule=schedule)]
    for start in range(12):
        resumed = [rate(step, schedule=schedule).hex() for step in range(start, 12)]
        assert resumed == whole[start:]
