"""Routing is decided once: the same again when it is recomputed, and as given when it is given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Find = Callable[..., Callable[..., Any]]


@pytest.fixture
def router_logits(generator: torch.Generator) -> Tensor:
    """512 tokens, 64 experts, half of them coarse enough to tie."""
    logits = torch.randn(512, 64, generator=generator)
    logits[256:] = (logits[256:] * 4).round() / 4
    return logits


def test_its_own_choice_given_back_changes_no_bit(operator: Find, router_logits: Tensor) -> None:
    route = operator("topk_route")
    own = route(router_logits, k=8, normalize=True)
    for chosen_TK in (None, own[2]):
        again = route(router_logits, k=8, normalize=True, chosen_TK=chosen_TK)
        assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))


@pytest.mark.parametrize("shape", [(512, 7), (511, 8)])
def test_choices_of_another_shape_are_refused(
    operator: Find, router_logits: Tensor, shape: tuple[int, int]
) -> None:
    chosen_TK = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"not \(512, 8\)"):
        operator("topk_route")(router_logits, k=8, normalize=True, chosen_TK=chosen_TK)
