"""Qwen3 equals transformers, keeps its gradients when they are deferred, and its names."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from pith.arch import from_config
from pith.arch.qwen3 import Qwen3
from pith.comm.exchange import LocalExchange
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Carry, Context, Layer, Parts, RouterLosses, Stage
from pith.models.qwen3 import Qwen3Stage
from pith.ops import choose

Grads = dict[str, Tensor]


def forward_loss(stage: Qwen3Stage, batch: tuple[Tensor, Tensor], context: Context) -> Tensor:
    """The loss through the stage's own pieces, as the engine calls them."""
    tokens_BS, labels_BS = batch
    carry = stage.embed(tokens_BS)
    for layer in stage.layers.values():
        carry = layer(carry, context)
    return stage.loss(carry, labels_BS)


def own_grads(stage: Qwen3Stage) -> Grads:
    """Plain autograd's gradients by canonical name; a tied head's joins the embedding's."""
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in stage.named_parameters()
    }
    if stage.arch.tie_word_embeddings:
        grads["embed_tokens.weight"] = grads["embed_tokens.weight"] + grads.pop("lm_head.weight")
    return grads


def oracle(config: dict[str, Any], stage: Qwen3Stage, dtype: torch.dtype) -> Any:
    """The transformers model of the same config and weights."""
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }
    config_kind, model_kind = kinds[config["model_type"]]
    settings = {k: v for k, v in config.items() if k not in ("model_type", "rope_theta")}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    foreign = config_kind(**settings, **eager)
    model = model_kind(foreign).to(dtype)
    weights = {foreign_name(name): p.detach() for name, p in stage.named_parameters()}
    for gate_name in [name for name in weights if name.endswith("experts.gate_proj.weight")]:
        prefix = gate_name.removesuffix("gate_proj.weight")
        gate_up = (weights.pop(gate_name), weights.pop(f"{prefix}up_proj.weight"))
        weights[f"{prefix}gate_up_proj"] = torch.cat(gate_up, dim=1)
        weights[f"{prefix}down_proj"] = weights.pop(f"{prefix}down_proj.weight")
    model.load_state_dict(weights, strict=True)
    return model


def foreign_name(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


def oracle_grads(model: Any) -> Grads:
    """Its gradients by canonical name."""
    grads: Grads = {}
    for full_name, parameter in model.named_parameters():
        name, grad = full_name.removeprefix("model."), parameter.grad
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            grads[f"{prefix}gate_proj.weight"], grads[f"{prefix}up_proj.weight"] = grad.chunk(2, 1)
        elif name.endswith("experts.down_proj"):
            grads[f"{name}.weight"] = grad
        else:
            grads[name] = grad
    return grads


def assert_near(found: Grads, wanted: Grads, tolerance: float) -> None:
    """Same names; per tensor ||found - wanted|| <= tolerance * ||wanted||, zero stays zero."""
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        error = (found[name] - reference).norm().item()
        assert error <= tolerance * reference.norm().item(), f"{name}: {error}"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_logits_and_every_gradient_equal_transformers(
    *,
    config: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    whole_model: Callable[..., Qwen3Stage],
    context_for: Callable[..., Context],
    batch: tuple[Tensor, Tensor],
    float64_oracle: Callable[[], Any],
) -> None:
    tokens_BS, labels_BS = batch
    stage = whole_model(config, dtype)
    context = context_for(stage, tokens_BS.shape[1])
    forward_loss(stage, batch, context).backward()

    with float64_oracle() if dtype is torch.float64 else nullcontext():
        model = oracle(config, stage, dtype)
        logits_BSV = model(tokens_BS, use_cache=False).logits
        cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=-100, reduction="sum"
        ).backward()

    found = {"logits": stage(tokens_BS, context).detach()}
    assert_near(found, {"logits": logits_BSV.detach()}, tolerance)
    assert_near(own_grads(stage), oracle_grads(model), tolerance)


@pytest.mark.parametrize("grouped_linear", ["reference", "library"])
def test_gradients_given_to_a_sink_equal_plain_autograd(
    *,
    config: dict[str, Any],
    grouped_linear: str,
    whole_model: Callable[..., Qwen3Stage],
    context_for: Callable[..., Context],
    batch: tuple[Tensor, Tensor],
) -> None:
    if grouped_linear == "library":
        dtype, tolerance = torch.float32, 1e-5  # that kernel has no float64
    else:
        dtype, tolerance = torch.float64, 1e-12
    plain = whole_model(config, dtype)
    context = context_for(plain, batch[0].shape[1], RouterLosses(balance_scale=0.7, z_scale=0.3))
    forward_loss(plain, batch, context).backward()

    sink, overrides = WeightGrads(), {"grouped_linear": grouped_linear}
    stage = whole_model(config, dtype, sink=sink, overrides=overrides)
    forward_loss(stage, batch, context).backward()
    sink.run_fresh()

    assert all(parameter.grad is None for parameter in stage.parameters())
    found = {name: sink.main_grad(p) for name, p in stage.named_parameters()}
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert_near(found, wanted, tolerance)


def test_five_stages_by_hand_are_the_layer_bit_for_bit(
    config: dict[str, Any],
    whole_model: Callable[..., Qwen3Stage],
    context_for: Callable[..., Context],
    batch: tuple[Tensor, Tensor],
) -> None:
    stage = whole_model(config, torch.float32)
    context = context_for(stage, batch[0].shape[1], RouterLosses(balance_scale=0.7, z_scale=0.3))
    hidden_BSD = stage.embed(batch[0]).hidden_BSD.detach()
    results = []
    for by_hand in (False, True):
        for number, module in stage.layers.items():
            layer: Layer = module
            stage.zero_grad()
            leaf = hidden_BSD.clone().requires_grad_()
            if by_hand:
                routed = layer.attend(Carry(leaf), context)
                assert layer.communicates == stage.arch.is_moe(int(number))
                assert (routed.ids_TK is not None) == layer.communicates
                received = layer.dispatch(routed).wait()
                combine = layer.combine(layer.experts(received), received.route)
                out = layer.aggregate(combine.wait(), routed.residual)
            else:
                out = layer.forward(Carry(leaf), context)
            out.hidden_BSD.square().sum().backward()
            results.append((out.hidden_BSD, leaf.grad, *(p.grad for p in module.parameters())))
    half = len(results) // 2
    for plain, hand in zip(results[:half], results[half:], strict=True):
        for a, b in zip(plain, hand, strict=True):
            assert torch.equal(a, b)


def test_gradients_returned_by_hand_equal_the_layers(
    moe_config: dict[str, Any],
    whole_model: Callable[..., Qwen3Stage],
    context_for: Callable[..., Context],
    batch: tuple[Tensor, Tensor],
) -> None:
    stage = whole_model(moe_config, torch.float64)
    context = context_for(stage, batch[0].shape[1], RouterLosses(balance_scale=0.7, z_scale=0.3))
    hidden_BSD = stage.embed(batch[0]).hidden_BSD.detach()
    layer = stage.layers["1"]

    whole = hidden_BSD.clone().requires_grad_()
    layer(Carry(whole), context).hidden_BSD.square().sum().backward()

    leaf = hidden_BSD.clone().requires_grad_()
    routed = layer.attend(Carry(leaf), context)
    with torch.no_grad():
        received = layer.dispatch(routed).wait()
    tokens_RD = received.tokens_RD.detach().requires_grad_()
    weights_RK = received.weights_RK.detach().requires_grad_()
    partial_RD = layer.experts(replace(received, tokens_RD=tokens_RD, weights_RK=weights_RK))
    residual = routed.residual.hidden_BSD.detach().requires_grad_()
    summed_TD = partial_RD.detach().requires_grad_()
    layer.aggregate(summed_TD, Carry(residual)).hidden_BSD.square().sum().backward()
    partial_RD.backward(layer.combine_backward(summed_TD.grad, received.route).wait())
    returned = layer.dispatch_backward(tokens_RD.grad, weights_RK.grad, received.route).wait()
    outputs = (routed.tokens_TD, routed.weights_TK, routed.residual.hidden_BSD)
    torch.autograd.backward(outputs, (*returned, residual.grad))
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=1e-12, atol=1e-12)


def cut(arch: Qwen3, layers: range) -> Qwen3Stage:
    parts = Parts(choose("cpu"), LocalExchange(), None, arch.num_experts, 0)
    return Qwen3Stage(
        arch,
        layers,
        is_first=layers.start == 0,
        is_last=layers.stop == arch.num_layers,
        parts=parts,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("num_stages", [1, 3])
def test_names_and_shapes_are_the_canonical_ones_in_every_cut(
    config: dict[str, Any], num_stages: int
) -> None:
    assert_canonical(Qwen3.from_config(config), num_stages)


PRESETS = sorted(
    folder.name
    for folder in resources.files("pith").joinpath("recipes").iterdir()
    if folder.joinpath("config.json").is_file()
)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_its_canonical_names_and_shapes(preset: str) -> None:
    file = resources.files("pith").joinpath("recipes", preset, "config.json")
    arch = from_config(json.loads(file.read_text()))
    assert_canonical(arch, num_stages=1)
    assert_canonical(arch, num_stages=4)


def assert_canonical(arch: Qwen3, num_stages: int) -> None:
    bounds = [arch.num_layers * s // num_stages for s in range(num_stages + 1)]
    stages = [cut(arch, range(a, b)) for a, b in pairwise(bounds)]
    found = [(n, tuple(p.shape)) for stage in stages for n, p in stage.named_parameters()]
    wanted = [(spec.name, spec.shape) for spec in arch.parameters()]
    if arch.tie_word_embeddings:
        wanted.append(("lm_head.weight", wanted[0][1]))
    assert len(found) == len(set(found))
    assert sorted(found) == sorted(wanted)
    assert all(p.is_meta for stage in stages for p in stage.parameters())


def test_a_rank_of_several_holds_its_share_of_the_experts(moe_config: dict[str, Any]) -> None:
    arch = Qwen3.from_config(moe_config)
    parts = Parts(choose("cpu"), LocalExchange(), None, num_local_experts=2, first_expert=4)
    stage: Stage = Qwen3Stage(
        arch, range(1), is_first=False, is_last=False, parts=parts, dtype=torch.float32
    )
    shapes = {name: tuple(p.shape) for name, p in stage.named_parameters()}
    assert shapes["layers.0.mlp.experts.gate_proj.weight"] == (2, 24, 32)
    assert shapes["layers.0.mlp.gate.weight"] == (8, 32)


def test_a_tied_head_shares_storage_and_stays_a_parameter(
    moe_config: dict[str, Any], whole_model: Callable[..., Qwen3Stage]
) -> None:
    stage = whole_model(moe_config | {"tie_word_embeddings": True}, torch.float32)
    embedding, head = (
        stage.get_parameter("embed_tokens.weight"),
        stage.get_parameter("lm_head.weight"),
    )
    assert head is not embedding
    with torch.no_grad():
        embedding.add_(1)
    assert torch.equal(head, embedding)


def test_rotary_angles_stay_exact_at_the_end_of_a_long_context(
    moe_config: dict[str, Any], whole_model: Callable[..., Qwen3Stage]
) -> None:
    stage = whole_model(moe_config | {"rope_theta": 1e6}, torch.float32)
    position = 40_959
    cos_BSd, _ = stage.rotary(torch.tensor([[position]]))
    wanted = [
        torch.tensor(position * 1e6 ** (-2 * (channel % 8) / 16), dtype=torch.float64).cos()
        for channel in range(16)
    ]
    assert cos_BSd.dtype == torch.float32
    torch.testing.assert_close(cos_BSd[0, 0].double(), torch.stack(wanted), rtol=0, atol=1e-7)
