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


@pytest.mark.parametrize("masked_percent", [0, 1, 50, 99, 100])
def test_sum_and_gradients_do_not_depend_on_the_cut(operator: Find, masked_percent: int) -> None:
    logits, labels = batch(masked_percent)
    logits.requires_grad_()
    results = []
    for num_cuts in (1, 2, 4, 8):
        logits.grad, total = None, 0.0
        for part, wanted in zip(logits.chunk(num_cuts), labels.chunk(num_cuts), strict=True):
            loss = operator("cross_entropy")(part.flatten(0, 1), wanted.flatten())
            loss.backward()
            total += loss.item()
        results.append((total, logits.grad))
    whole, grad = results[0]
    for cut, cut_grad in results[1:]:
        assert cut == pytest.approx(whole, rel=1e-6, abs=0)
        assert torch.equal(cut_grad, grad)


def test_a_label_outside_the_vocabulary_is_refused(operator: Find) -> None:
    with pytest.raises(IndexError):
        operator("cross_entropy")(torch.zeros(1, 11), torch.tensor([11]))
