"""The router decides in float32 or wider, whatever the element type of the model."""

from collections.abc import Callable

import torch
from torch import nn

from pith.comm.exchange import LocalExchange
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Context, Parts
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
