"""Routing is decided in float32 or wider, and ties fall to the lower expert."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Find = Callable[..., Callable[..., Any]]


@pytest.fixture
def router_logits() -> Tensor:
    """4096 tokens, 64 experts: random, coarse enough to tie, all equal, and one bit apart."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4096, 64, generator=generator)
    logits[1024:2048] = (logits[1024:2048] * 4).round() / 4
    logits[2048:2056] = 0.5
    near = torch.tensor(1.0)
    logits[2056:2064] = near
    logits[2056:2064, 63] = torch.nextafter(near, torch.tensor(2.0))
    return logits


def best_by_sorting(logits_TE: Tensor, k: int) -> np.ndarray:
    """Expert ids by falling logit, then rising id, in float64."""
    scores = logits_TE.double().numpy()
    ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.lexsort((ids, -scores), axis=1)[:, :k]


def test_chosen_experts_equal_the_float64_choice_for_every_token(
    operator: Find, router_logits: Tensor
) -> None:
    for _ in range(2):  # the same again when it is recomputed
        _, _, ids_TK = operator("topk_route")(router_logits, k=8, normalize=True)
        assert np.array_equal(ids_TK.numpy(), best_by_sorting(router_logits, 8))


def test_a_decision_in_bf16_would_have_been_caught(operator: Find, router_logits: Tensor) -> None:
    _, _, ids_TK = operator("topk_route")(router_logits.bfloat16(), k=8, normalize=True)
    assert not np.array_equal(ids_TK.numpy(), best_by_sorting(router_logits, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_and_weights_are_never_narrower_than_float32(
    operator: Find, router_logits: Tensor, dtype: torch.dtype
) -> None:
    probs_TE, weights_TK, ids_TK = operator("topk_route")(
        router_logits.to(dtype), k=4, normalize=False
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert (probs_TE.dtype, weights_TK.dtype, ids_TK.dtype) == (wide, wide, torch.int64)
    assert torch.equal(weights_TK, probs_TE.gather(1, ids_TK))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_weights_and_their_gradients_equal_the_formula(
    operator: Find, normalize: bool, given: bool, generator: torch.Generator
) -> None:
    logits = torch.randn(7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    dweights = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    worst_TK = logits.detach().argsort(dim=1)[:, :3]
    chosen_TK = worst_TK if given else None
    probs_TE, weights_TK, ids_TK = operator("topk_route")(
        logits, k=3, normalize=normalize, chosen_TK=chosen_TK
    )
    assert torch.equal(ids_TK, worst_TK) == given
    weights_TK.backward(dweights)
    found, logits.grad = logits.grad, None
    powers = logits.exp()
    chosen = powers.gather(1, ids_TK)
    wanted = chosen / (chosen if normalize else powers).sum(1, keepdim=True)
    wanted.backward(dweights)
    torch.testing.assert_close(probs_TE, powers / powers.sum(1, keepdim=True))
    torch.testing.assert_close(weights_TK, wanted)
    torch.testing.assert_close(found, logits.grad)


def test_its_own_choice_given_back_changes_no_bit(operator: Find, router_logits: Tensor) -> None:
    route = operator("topk_route")
    own = route(router_logits, k=8, normalize=True)
    again = route(router_logits, k=8, normalize=True, chosen_TK=own[2])
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))


@pytest.mark.parametrize("shape", [(4096, 7), (4095, 8)])
def test_choices_of_another_shape_are_refused(
    operator: Find, router_logits: Tensor, shape: tuple[int, int]
) -> None:
    chosen_TK = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"not \(4096, 8\)"):
        operator("topk_route")(router_logits, k=8, normalize=True, chosen_TK=chosen_TK)
