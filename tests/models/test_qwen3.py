"""What of Qwen3 `pith check model` does not look at: a share of the experts, tied storage, rope."""

from typing import Any

import pytest
import torch
from torch import nn

from pith.arch import Architecture, from_config
from pith.comm.exchange import LocalExchange
from pith.layer.protocol import Parts, Stage
from pith.ops import choose
from pith.train.build import build_stage
from pith.verify.model import variants


def architecture(**changes: Any) -> Architecture:
    return from_config(dict(variants("qwen3")["moe"]) | changes)


def whole(arch: Architecture) -> Stage:
    parts = Parts(choose("cpu"), LocalExchange(), None, arch.num_experts, 0)
    layers = range(arch.num_layers)
    stage = build_stage(arch, layers, is_first=True, is_last=True, parts=parts, dtype=torch.float32)
    assert isinstance(stage, nn.Module)
    return stage.to_empty(device="cpu")


@pytest.mark.parametrize("first_expert", [0, 4])
def test_a_rank_of_several_holds_its_share_of_the_experts(first_expert: int) -> None:
    parts = Parts(choose("cpu"), LocalExchange(), None, 2, first_expert)
    stage = build_stage(
        architecture(), range(1), is_first=False, is_last=False, parts=parts, dtype=torch.float32
    )
    shapes = {name: tuple(p.shape) for name, p in stage.named_parameters()}
    assert shapes["layers.0.mlp.experts.gate_proj.weight"] == (2, 24, 32)
    assert shapes["layers.0.mlp.gate.weight"] == (8, 32)


def test_a_tied_head_shares_storage_and_stays_a_parameter() -> None:
    stage = whole(architecture(tie_word_embeddings=True))
    embedding = stage.get_parameter("embed_tokens.weight")
    stage.tie_to(embedding)
    head = stage.get_parameter("lm_head.weight")
    assert head is not embedding
    with torch.no_grad():
        embedding.fill_(3)
    assert torch.equal(head, embedding)


def test_rotary_angles_stay_exact_at_the_end_of_a_long_context() -> None:
    position = 40_959
    cos_BSd, _ = whole(architecture(rope_theta=1e6)).rotary(torch.tensor([[position]]))
    wanted = [
        torch.tensor(position * 1e6 ** (-2 * (channel % 8) / 16), dtype=torch.float64).cos()
        for channel in range(16)
    ]
    assert cos_BSd.dtype == torch.float32
    torch.testing.assert_close(cos_BSd[0, 0].double(), torch.stack(wanted), rtol=0, atol=1e-7)
