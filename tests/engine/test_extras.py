"""Extra tensors of a carry pass through stages that do not read them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pith.arch import from_config
from pith.comm.exchange import LocalExchange
from pith.engine.chunk import MicroBatch, backward_chunk, drain, forward_chunk
from pith.engine.segment import Tape
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Context, Parts, Stage
from pith.ops import choose
from pith.train.build import build_stage
from pith.train.step import RoutingMeter
from tests.train.parity import SIZES

BuildStage = Callable[[range, WeightGrads], Stage]


@pytest.fixture
def last_stage() -> BuildStage:
    """The head with these layers before it, weights drawn."""

    def build(layers: range, sink: WeightGrads) -> Stage:
        arch = from_config(SIZES)
        stage = build_stage(
            arch,
            layers,
            is_first=False,
            is_last=True,
            parts=Parts(choose("cpu"), LocalExchange(), sink, arch.num_experts, 0),
            dtype=torch.float64,
        ).to_empty(device="cpu")
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
        return stage

    return build


@pytest.mark.parametrize("layers", [range(6, 6), range(1, 2), range(4, 6)])
def test_an_extra_that_nobody_reads_has_a_gradient_of_zero(
    last_stage: BuildStage, layers: range
) -> None:
    sink = WeightGrads()
    stage = last_stage(layers, sink)
    tokens_BS = torch.zeros(2, 8, dtype=torch.int64)
    context = Context(*stage.rotary(torch.arange(8)[None]), RoutingMeter())
    batch = MicroBatch(tokens_BS, tokens_BS + 1, context)
    carry: tuple[Tensor, ...] = (
        torch.randn(2, 8, 16, dtype=torch.float64),
        torch.randn(2, 8, 5, dtype=torch.float64),
    )
    tape = Tape(recording=True)

    (loss,) = drain(forward_chunk(stage, batch, carry, tape))
    grads = drain(backward_chunk(stage, tape, (torch.ones_like(loss),), weights=sink, split=None))

    assert [grad.shape for grad in grads] == [tensor.shape for tensor in carry]
    assert grads[0].any()
    assert not grads[1].any()
