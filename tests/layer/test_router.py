"""The router decides in float32 or wider, and follows a routing that replaces its choice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pith.comm.exchange import LocalExchange
from pith.engine.weight_grads import WeightGrads
from pith.layer.balance import StepLoad
from pith.layer.protocol import Context, Parts, RouterLosses
from pith.layer.router import Router
from pith.ops import choose


def test_a_bf16_model_routes_as_its_exact_product_does(
    make_context: Callable[..., Context], generator: torch.Generator
) -> None:
    sink = WeightGrads()
    parts = Parts(choose("cuda", {"rms_norm": "reference"}), LocalExchange(), sink, 64, 0)
    router = Router((64, 32), layer=0, top_k=8, normalize=True, parts=parts, dtype=torch.bfloat16)
    nn.init.normal_(router.weight, generator=generator)
    tokens = torch.randn(2048, 32, generator=generator).bfloat16()
    ids_TK, weights_TK = router(tokens.requires_grad_(), make_context(2048))
    exact = tokens.double() @ router.weight.double().t()
    ordered = exact.sort(dim=1, descending=True).values
    clear = ordered[:, 7] - ordered[:, 8] > 1e-4  # wider apart than float32 can mistake
    assert clear.sum() > 2000
    wanted = exact.topk(8).indices.sort(dim=1).values
    assert torch.equal(ids_TK.sort(dim=1).values[clear], wanted[clear])
    assert weights_TK.dtype == torch.float32

    narrow = (tokens @ router.weight.t()).topk(8).indices.sort(dim=1).values
    assert not torch.equal(narrow[clear], wanted[clear])

    weights_TK[:, 0].sum().backward()
    sink.run_fresh()
    assert tokens.grad is not None
    main = sink.main_grad(router.weight)
    assert main.dtype == torch.float32
    assert main.abs().sum() > 0


@dataclass
class Upside:
    """Sends every token to the experts that mirror those it chose."""

    seen: list[tuple[int, Tensor]] = field(default_factory=list)

    def choose(self, layer: int, ids_TK: Tensor) -> Tensor:
        self.seen.append((layer, ids_TK))
        return 7 - ids_TK


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("scope", ["sequence", "micro-batch", "global-batch"])
def test_choice_load_and_all_gradients_equal_the_definition_also_when_routing_is_replaced(
    *,
    scope: Any,
    replaced: bool,
    normalize: bool,
    make_parts: Callable[..., Parts],
    make_context: Callable[..., Context],
    losses_by_definition: Callable[..., tuple[Tensor, Tensor]],
    generator: torch.Generator,
    records: Any,
) -> None:
    shape = {"layer": 5, "top_k": 3, "normalize": normalize, "dtype": torch.float64}
    router = Router((8, 4), parts=make_parts(8), **shape)
    nn.init.normal_(router.weight, generator=generator)
    tokens_TD = torch.randn(12, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    routing = Upside() if replaced else None
    losses = RouterLosses(scope, 0.37, 0.51, load=StepLoad(lambda counts: counts))
    ids_TK, weights_TK = router(tokens_TD, make_context(6, losses, routing))

    logits_TE = tokens_TD @ router.weight.t()
    best_TK = logits_TE.topk(3).indices
    wanted_TK = 7 - best_TK if replaced else best_TK
    assert torch.equal(ids_TK, wanted_TK)
    if routing is not None:
        ((layer, seen_TK),) = routing.seen
        assert layer == 5
        assert torch.equal(seen_TK, best_TK)
        assert not torch.equal(wanted_TK.sort(1).values, best_TK.sort(1).values)
    powers = logits_TE.exp()
    chosen = powers.gather(1, wanted_TK)
    exact_TK = chosen / (chosen if normalize else powers).sum(1, keepdim=True)
    torch.testing.assert_close(weights_TK, exact_TK, rtol=1e-12, atol=0)

    halves = (slice(0, 6), slice(6, 12)) if scope == "sequence" else (slice(0, 12),)
    groups = [(rows, wanted_TK[rows]) for rows in halves]
    balance, z = losses_by_definition(logits_TE, groups)
    leaves = (tokens_TD, router.weight)
    upstream_TK = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(weights_TK, leaves, upstream_TK)
    loss = (exact_TK * upstream_TK).sum() + 0.37 * balance + 0.51 * z
    wanted = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    ((_, load, *values),) = records.entries
    assert load == wanted_TK.flatten().bincount(minlength=8).tolist()
    assert values == pytest.approx([balance.item(), z.item()], rel=1e-12)
