"""The criterion is a sum: however a batch is cut and masked, loss and gradients are the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Find = Callable[..., Callable[..., Any]]


def batch(masked_percent: int) -> tuple[Tensor, Tensor]:
    """Logits [8, 16, 11] of 8 sequences, labels with that share masked, sequence 2 in whole."""
    generator = torch.Generator().manual_seed(masked_percent)
    logits = torch.randn(8, 16, 11, generator=generator, dtype=torch.float32) * 5
    labels = torch.randint(11, (8, 16), generator=generator)
    labels[torch.rand(8, 16, generator=generator) * 100 < masked_percent] = -100
    labels[2] = -100
    return logits, labels


def by_formula(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Sum and gradient over counted labels in float64."""
    probs = logits.double().softmax(-1)
    counted = labels != -100
    hot = torch.nn.functional.one_hot(labels.clamp(min=0), 11).double()
    loss = -(probs.log() * hot).sum(-1)[counted].sum()
    return loss.item(), (probs - hot) * counted.unsqueeze(-1)


@pytest.mark.parametrize("masked_percent", [0, 1, 50, 99, 100])
@pytest.mark.parametrize("num_cuts", [1, 2, 4, 8])
def test_sum_and_gradients_do_not_depend_on_the_cut(
    operator: Find, masked_percent: int, num_cuts: int
) -> None:
    logits, labels = batch(masked_percent)
    logits.requires_grad_()
    total = 0.0
    for part, wanted in zip(logits.chunk(num_cuts), labels.chunk(num_cuts), strict=True):
        loss = operator("cross_entropy")(part.flatten(0, 1), wanted.flatten())
        assert loss.shape == ()
        loss.backward()
        total += loss.item()
    loss, grad = by_formula(logits.detach(), labels)
    assert total == pytest.approx(loss, rel=1e-6, abs=0)
    torch.testing.assert_close(logits.grad.double(), grad, rtol=1e-5, atol=1e-6)


def test_nothing_counted_gives_exactly_zero_and_no_nan(operator: Find) -> None:
    logits = torch.randn(5, 11, requires_grad=True)
    loss = operator("cross_entropy")(logits, torch.full((5,), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.eq(0).all()


def test_narrow_logits_are_summed_in_float32(operator: Find) -> None:
    logits, labels = batch(0)
    narrow = logits.bfloat16().flatten(0, 1).requires_grad_()
    loss = operator("cross_entropy")(narrow, labels.flatten())
    loss.backward()
    assert loss.dtype == torch.float32
    wanted, _ = by_formula(logits.bfloat16(), labels)
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert narrow.grad.dtype == torch.bfloat16


def test_a_label_outside_the_vocabulary_is_refused(operator: Find) -> None:
    with pytest.raises(IndexError):
        operator("cross_entropy")(torch.zeros(1, 11), torch.tensor([11]))
