"""Main gradients: their precision, and the order in which they are added to."""

import pytest
import torch

from pith.engine.weight_grads import WeightGrads


@pytest.fixture
def weights() -> WeightGrads:
    return WeightGrads()


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_main_gradients_are_float32_or_as_wide_as_the_parameter(dtype, wanted, weights):
    weight = parameter(dtype)
    weights.add(weight, torch.ones(2, 3, dtype=dtype))
    assert weights.main_grad(weight).dtype == wanted
    assert weights.main_grad(weight).eq(1).all()


def test_many_small_bfloat16_gradients_do_not_vanish_beside_a_large_one(weights):
    weight = parameter(torch.bfloat16)
    weights.add(weight, torch.full((2, 3), 256.0, dtype=torch.bfloat16))
    for _ in range(64):
        weights.add(weight, torch.full((2, 3), 2.0**-6, dtype=torch.bfloat16))
    assert weights.main_grad(weight).eq(257).all()


def test_a_parameter_never_used_has_a_gradient_of_zeros(weights):
    weight = parameter()
    found = weights.main_grad(weight)
    assert found.shape == weight.shape
    assert found.eq(0).all()
    assert not found.requires_grad


def test_equal_parameters_have_gradients_of_their_own(weights):
    first, second = parameter(), parameter()
    weights.add(first, torch.ones(2, 3))
    assert weights.main_grad(first).eq(1).all()
    assert weights.main_grad(second).eq(0).all()


def journal_entry(journal: list[str], text: str):
    def accumulate(main: torch.Tensor) -> None:
        journal.append(text)
        main.mul_(2).add_(len(journal))  # no other order gives the same number

    return accumulate


def test_weight_gradients_run_first_in_first_out_each_on_its_own_main_gradient(weights):
    journal: list[str] = []
    first, second = parameter(), parameter()
    for text, weight in (("a", first), ("b", second), ("c", first)):
        weights.defer(weight, journal_entry(journal, text))
    assert journal == []
    weights.run_fresh()
    assert journal == ["a", "b", "c"]
    assert weights.main_grad(first).eq(2 * 1 + 3).all()
    assert weights.main_grad(second).eq(2).all()
    weights.run_fresh()
    assert journal == ["a", "b", "c"], "what ran once does not run again"


def test_kept_weight_gradients_run_in_their_slot_alone_and_in_the_order_they_came(weights):
    journal: list[str] = []
    weight = parameter()
    for text in ("a", "b"):  # two segments of one backward
        weights.defer(weight, journal_entry(journal, f"0.0 {text}"))
        weights.store_fresh(0, 0)
    weights.defer(weight, journal_entry(journal, "1.0"))
    weights.store_fresh(1, 0)
    weights.defer(weight, journal_entry(journal, "fresh"))
    weights.run_fresh()
    assert journal == ["fresh"]
    weights.run_stored(1, 0)
    weights.run_stored(0, 0)
    assert journal == ["fresh", "1.0", "0.0 a", "0.0 b"]
    with pytest.raises(KeyError):
        weights.run_stored(0, 0)


def test_weight_gradients_run_without_grad_mode(weights):
    weight, modes = parameter(), []
    weights.defer(weight, lambda main: modes.append(torch.is_grad_enabled()))
    weights.run_fresh()
    weights.add(weight, torch.ones(2, 3, requires_grad=True))
    assert modes == [False]
    assert not weights.main_grad(weight).requires_grad


def test_zero_empties_the_same_buffers_also_of_what_is_not_finite(weights):
    weight = parameter()
    weights.add(weight, torch.full((2, 3), torch.nan))
    before = weights.main_grad(weight)
    weights.zero()
    assert weights.main_grad(weight) is before
    assert before.eq(0).all()


def test_weight_gradients_that_were_neither_run_nor_kept_stop_the_next_step(weights):
    weights.zero()
    weights.defer(parameter(), lambda main: None)
    with pytest.raises(AssertionError, match="neither run nor kept"):
        weights.zero()


def test_weight_gradients_kept_and_never_run_stop_the_next_step_by_name(weights):
    weights.defer(parameter(), lambda main: None)
    weights.store_fresh(3, 5)
    with pytest.raises(AssertionError, match=r"never run: \[\(3, 5\)\]"):
        weights.zero()
