"""`pith check model`: the shipped families hold, and every broken variant fails the right check."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.arch import SUPPORTED, from_config
from pith.arch.decoder import Decoder
from pith.arch.parameter import Role
from pith.cli import app
from pith.config import shipped
from pith.errors import RequestError, UnavailableError
from pith.layer.dispatch import dispatch
from pith.layer.five_stages import DecoderLayer
from pith.layer.weights import RMSNorm
from pith.models.stage import DecoderStage
from pith.report import Check
from pith.verify.model import check_model, check_tiny, families, find, variants
from pith.verify.model_facts import check_facts
from pith.verify.subject import Subject, distance

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]

PARITY = {
    f"{what}, {dtype}"
    for what in ("logits", "loss", "every gradient")
    for dtype in ("float64", "float32")
}
GRADIENTS = {name for name in PARITY if name.startswith("every gradient")}
SPOKEN, COMPOSED = "what a layer says it sends", "five stages composed"
BY_HAND = "gradients sent back by hand"
CONSTANTS = "first values of norms and biases"
HUB = "names and shapes on the Hub"
CANONICAL = "canonical names and shapes"
SPREAD = "spread of first values"
SINK = "gradients in the sink"
UNCOMPARED = "parity with transformers"


def fields(variant: str = "moe", **changes: Any) -> dict[str, Any]:
    """A variant cut down to what still shows every fault, so that it is run in half the time."""
    config = dict(variants("qwen3")[variant]) | {"num_hidden_layers": 2} | changes
    if "num_experts" in config:
        config["num_experts"] = 4
    return config


def subject(variant: str = "moe", **changes: Any) -> Subject:
    config = fields(variant, **changes)
    return Subject(variant, config, from_config(config))


def failed(checks: list[Check]) -> dict[str, Check]:
    """The checks that failed, by what they promise."""
    return {check.name.partition(": ")[2]: check for check in checks if not check.ok}


def operator(patch: Patch, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, *args)` in the place of the reference operator `name`."""
    module = importlib.import_module(f"pith.ops.{name}.reference")
    original = getattr(module, name)
    wrong = lambda *args, **kwargs: change(original, *args, **kwargs)  # noqa: E731
    wrong.__module__ = module.__name__
    patch.setattr(module, name, wrong)


def method(patch: Patch, kind: type, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, self, *args)` in the place of a method."""
    original = getattr(kind, name)
    patch.setattr(kind, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))


def test_every_variant_of_every_family_holds() -> None:
    checks = list(check_model(list(families())))
    assert failed(checks) == {}
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    for family in families():
        for variant in variants(family):
            mine = {n.removeprefix(f"{family}/{variant}: ") for n in names}
            assert mine >= {
                HUB,
                CANONICAL,
                SINK,
                CONSTANTS,
                SPOKEN,
                COMPOSED,
                BY_HAND,
                *PARITY,
                "FLOPs per token",
            }


def test_every_model_type_has_a_config_that_it_is_checked_with() -> None:
    found = {c["model_type"] for family in families() for c in variants(family).values()}
    assert found == set(SUPPORTED)
    for family in families():
        assert (files("pith") / "arch" / f"{family}.py").is_file()


def test_a_recipe_holds_whole_as_facts_and_scaled_down_as_numbers() -> None:
    checks = list(check_model(["tiny-moe"]))
    assert failed(checks) == {}
    names = {check.name for check in checks}
    assert {"tiny-moe: number of parameters", "tiny-moe scaled down: logits, float64"} <= names
    assert "tiny-moe: logits, float64" not in names


@pytest.mark.parametrize("name", shipped())
def test_the_facts_of_every_shipped_model_hold(name: str) -> None:
    (config,) = find(name).whole.values()
    architecture = from_config(config)
    checks = list(check_facts(Subject(name, config, architecture)))
    assert failed(checks) == {}
    (count,) = (check for check in checks if check.name == f"{name}: number of parameters")
    assert count.found == f"{architecture.num_parameters():,}"


def queries_turned_one_further(patch: Patch) -> None:
    def change(rope: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = (cos.roll(-1, 1), sin.roll(-1, 1)) if x.shape[2] == 4 else (cos, sin)
        return rope(x, *turned)

    operator(patch, "rope", change)


def gate_and_up_swapped(patch: Patch) -> None:
    operator(patch, "swiglu", lambda swiglu, gate, up: swiglu(up, gate))


def gate_without_gradient(patch: Patch) -> None:
    operator(patch, "swiglu", lambda swiglu, gate, up: swiglu(gate.detach(), up))


def heads_not_normed(patch: Patch) -> None:
    def change(forward: Any, norm: RMSNorm, x: Tensor) -> Tensor:
        return x if x.shape[-1] == 16 else forward(norm, x)

    method(patch, RMSNorm, "forward", change)


def router_not_normalised(patch: Patch) -> None:
    def change(route: Any, logits_TE: Tensor, **kwargs: Any) -> Any:
        return route(logits_TE, **(kwargs | {"normalize": False}))

    operator(patch, "topk_route", change)


def router_in_bfloat16(patch: Patch) -> None:
    def change(route: Any, logits_TE: Tensor, **kwargs: Any) -> Any:
        return route(logits_TE.bfloat16().to(logits_TE.dtype), **kwargs)

    operator(patch, "topk_route", change)


def attention_not_finite(patch: Patch) -> None:
    module = importlib.import_module("pith.ops.attention.library")
    original = module.attention
    wrong = lambda *args, **kwargs: original(*args, **kwargs) * torch.nan  # noqa: E731
    wrong.__module__ = module.__name__
    patch.setattr(module, "attention", wrong)


def ignored_labels_counted(patch: Patch) -> None:
    operator(patch, "cross_entropy", lambda loss, logits, labels: loss(logits, labels.clamp(min=0)))


def layer_dropped(patch: Patch) -> None:
    def change(forward: Any, layer: DecoderLayer, carry: Any, context: Any) -> Any:
        return carry if layer.mlp.gate.layer == 1 else forward(layer, carry, context)

    method(patch, DecoderLayer, "forward", change)


def dispatch_loses_a_token(patch: Patch) -> None:
    def change(dispatch: Any, layer: DecoderLayer, routed: Any) -> Any:
        mask_T1 = torch.ones_like(routed.tokens_TD[:, :1]).index_fill(0, torch.tensor([5]), 0)
        return dispatch(layer, replace(routed, tokens_TD=routed.tokens_TD * mask_T1))

    method(patch, DecoderLayer, "dispatch", change)


def gradient_sent_back_twice(patch: Patch) -> None:
    def change(back: Any, layer: DecoderLayer, tokens_RD: Tensor, *rest: Any) -> Any:
        return back(layer, tokens_RD * 2, *rest)

    method(patch, DecoderLayer, "dispatch_backward", change)


def combine_gradient_lost(patch: Patch) -> None:
    def change(back: Any, layer: DecoderLayer, summed_TD: Tensor, route: Any) -> Any:
        return back(layer, summed_TD * 0, route)

    method(patch, DecoderLayer, "combine_backward", change)


def sends_without_a_word(patch: Patch) -> None:
    def claim(init: Any, layer: DecoderLayer, *args: Any, **kwargs: Any) -> None:
        init(layer, *args, **kwargs)
        layer.communicates = False

    method(patch, DecoderLayer, "__init__", claim)
    method(patch, DecoderLayer, "dispatch", lambda _, layer, routed: dispatch(routed, layer.parts))


def norms_not_tapped(patch: Patch) -> None:
    patch.setattr("pith.layer.weights.tap", lambda parameter, sink: parameter)


def names_of_another_family(patch: Patch) -> None:
    def change(hf_name: Any, arch: Decoder, name: str) -> tuple[str, ...]:
        return tuple(n.replace("mlp.gate.", "mlp.router.") for n in hf_name(arch, name))

    method(patch, Decoder, "hf_name", change)


def no_names(patch: Patch) -> None:
    method(patch, Decoder, "hf_name", lambda hf_name, arch, name: ())


def head_not_counted(patch: Patch) -> None:
    method(patch, Decoder, "head_cost", lambda cost, arch, length: 0.0)


def router_not_counted(patch: Patch) -> None:
    def change(costs: Any, arch: Decoder, length: int, **kwargs: Any) -> tuple[float, ...]:
        router = 6.0 * arch.num_experts * arch.hidden_size
        return tuple(cost - router for cost in costs(arch, length, **kwargs))

    method(patch, Decoder, "layer_costs", change)


def final_norm_unlisted(patch: Patch) -> None:
    def change(parameters: Any, arch: Decoder) -> Any:
        return tuple(s for s in parameters(arch) if s.name != "norm.weight")

    method(patch, Decoder, "parameters", change)


def norms_from_zero(patch: Patch) -> None:
    def change(parameters: Any, arch: Decoder) -> Any:
        specs = parameters(arch)
        return tuple(replace(s, fill=0.0) if s.role is Role.NORM else s for s in specs)

    method(patch, Decoder, "parameters", change)


def outputs_not_scaled(patch: Patch) -> None:
    def change(parameters: Any, arch: Decoder) -> Any:
        return tuple(replace(s, std=0.02) if s.std else s for s in parameters(arch))

    method(patch, Decoder, "parameters", change)


def a_stage_raises(patch: Patch) -> None:
    def change(parts: Any, layer: DecoderLayer, received: Any) -> Tensor:
        return parts(layer, replace(received, weights_RK=received.weights_RK[1:]))

    method(patch, DecoderLayer, "experts", change)


FAR, NEAR, LOSSES = "logits, float64", "every gradient, float64", "loss, float64"
# What is broken; the checks that fail, no other; what one of them says, and where to look.
BROKEN: list[tuple[Break, set[str], tuple[str, str, str]]] = [
    (
        queries_turned_one_further,
        PARITY,
        (FAR, ": what the MLP of layer 0 reads ", "attention, rope or norms of layer 0"),
    ),
    (
        gate_and_up_swapped,
        PARITY,
        (FAR, ": the output of layer 0 ", "router, experts or MLP of layer 0"),
    ),
    (
        gate_without_gradient,
        GRADIENTS,
        (NEAR, ": layers.1.mlp.experts.gate_proj.weight 1.0e+00 apart", "pith/models/qwen3.py"),
    ),
    (heads_not_normed, PARITY, (FAR, ": what the MLP of layer 0 reads ", "norms of layer 0")),
    (router_not_normalised, PARITY, (FAR, ": the output of layer 0 ", "router")),
    (router_in_bfloat16, PARITY, (FAR, ": the output of layer 0 ", "router")),
    (
        ignored_labels_counted,
        PARITY - {"logits, float64", "logits, float32"},
        (LOSSES, " apart", "pith/models/qwen3.py loss"),
    ),
    (
        layer_dropped,
        PARITY | {COMPOSED, BY_HAND},
        (FAR, ": the output of layer 1 ", "router, experts or MLP of layer 1"),
    ),
    (dispatch_loses_a_token, PARITY, (FAR, ": the output of layer 0 ", "experts")),
    (gradient_sent_back_twice, {BY_HAND}, (BY_HAND, "layer 1 is ", "five_stages.py")),
    (combine_gradient_lost, {BY_HAND}, (BY_HAND, "layer 0 is ", "five_stages.py")),
    (sends_without_a_word, {SPOKEN}, (SPOKEN, "layer 1 communicates: False", "five_stages.py")),
    (norms_not_tapped, {SINK}, (SINK, "layers.0.input_layernorm.weight goes to autograd", "")),
    (
        names_of_another_family,
        {HUB, UNCOMPARED},
        (
            HUB,
            "only on the Hub model.layers.*.mlp.gate.weight (x 2); "
            "only in pith model.layers.*.mlp.router.weight (x 2)",
            "hf_name",
        ),
    ),
    (no_names, {"facts", CONSTANTS, UNCOMPARED}, ("facts", "IndexError", "pith/verify")),
    (head_not_counted, {"FLOPs per token"}, ("FLOPs per token", "(-5.97%)", "head_cost")),
    (router_not_counted, {"FLOPs per token"}, ("FLOPs per token", "(-0.78%)", "layer_costs")),
    (norms_from_zero, {CONSTANTS}, (CONSTANTS, "layers.0.input_layernorm.weight is 0", "")),
    (
        outputs_not_scaled,
        {SPREAD},
        (SPREAD, "layers.0.self_attn.o_proj.weight has 0.02", "parameters"),
    ),
    (
        a_stage_raises,
        {"five stages", SINK, UNCOMPARED},
        ("five stages", "Error", "pith/ops/weighted_sum/reference.py:"),
    ),
]


@pytest.mark.parametrize(
    ("break_it", "wanted", "told"), BROKEN, ids=[row[0].__name__ for row in BROKEN]
)
def test_a_broken_model_fails_the_checks_that_are_about_it(
    monkeypatch: Patch, break_it: Break, wanted: set[str], told: tuple[str, str, str]
) -> None:
    break_it(monkeypatch)
    found = failed(list(check_tiny(subject())))
    assert set(found) == wanted
    assert all(check.found and check.wanted and "pith/" in check.where for check in found.values())
    check, text, where = told
    assert text in found[check].found
    assert where in found[check].where


def test_a_tensor_that_the_facts_forget_is_named_by_every_check_about_names(
    monkeypatch: Patch,
) -> None:
    final_norm_unlisted(monkeypatch)
    found = failed(list(check_tiny(subject())))
    assert found.keys() >= {CANONICAL, HUB, "number of parameters", UNCOMPARED}
    assert found[CANONICAL].found == "only in the stages norm.weight"
    assert found[HUB].found == "only on the Hub model.norm.weight"
    assert found["number of parameters"].found == "35,072"
    assert found["number of parameters"].wanted.startswith("35,104")


def test_what_is_not_finite_fails(monkeypatch: Patch) -> None:
    attention_not_finite(monkeypatch)
    found = failed(list(check_tiny(subject("dense"))))
    assert found.keys() >= PARITY | {BY_HAND, SINK}


def test_what_only_float32_rounds_away_is_found(monkeypatch: Patch) -> None:
    def change(swiglu: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = swiglu(gate, up)
        return out.to(torch.float16).to(out.dtype) if out.dtype is torch.float32 else out

    operator(monkeypatch, "swiglu", change)
    found = failed(list(check_tiny(subject())))
    assert (
        {"logits, float32", "every gradient, float32"}
        <= set(found)
        <= {name for name in PARITY if name.endswith("float32")}
    )
    assert "(limit 1.0" in found["logits, float32"].found


def test_all_names_that_differ_are_in_the_report(
    monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields()))
    names_of_another_family(monkeypatch)
    assert app.run(["check", "model", str(path), "--json"]) == 1
    details = json.loads(capsys.readouterr().out)["data"]["details"]
    assert details == {
        f"{name}: {HUB}": {
            "only on the Hub": [f"model.layers.{n}.mlp.gate.weight" for n in range(2)],
            "only in pith": [f"model.layers.{n}.mlp.router.weight" for n in range(2)],
        }
        for name in (str(path), f"{path} scaled down")
    }


def test_a_head_that_stays_untied_is_found(monkeypatch: Patch) -> None:
    def untied(stage: DecoderStage[Any], embedding: Any) -> None:
        torch.nn.init.ones_(stage.lm_head.weight)

    monkeypatch.setattr(DecoderStage, "tie_to", untied)
    found = failed(list(check_tiny(subject("moe-tied"))))
    assert set(found) == PARITY
    assert found["logits, float64"].where == "pith/models/qwen3.py: the final norm or the head"


def test_a_field_that_nobody_reads_fails() -> None:
    found = failed(list(check_tiny(subject("dense", clamp_logits=True))))
    assert set(found) == {"fields of the config"}
    assert "clamp_logits" in found["fields of the config"].found


def test_all_positions_moved_alike_make_no_difference(monkeypatch: Patch) -> None:
    method(monkeypatch, DecoderStage, "rotary", lambda rotary, stage, p_BS: rotary(stage, p_BS + 3))
    assert failed(list(check_tiny(subject()))) == {}


@pytest.mark.parametrize(
    ("found", "wanted", "far"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 9.0], [3.0, 4.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [0.0, 0.0], float("inf")),
        ([float("nan"), 0.0], [3.0, 4.0], float("inf")),
        ([float("nan")], [float("nan")], float("inf")),
        ([float("inf")], [float("inf")], float("inf")),
        ([3.0], [3.0, 3.0], float("inf")),
    ],
)
def test_distance_is_relative_and_infinite_where_nothing_can_be_said(
    found: list[float], wanted: list[float], far: float
) -> None:
    assert distance(torch.tensor(found), torch.tensor(wanted)) == far


def test_a_config_is_checked_from_the_command_line(
    monkeypatch: Patch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "config.json", tmp_path / "report.json"
    path.write_text(json.dumps(fields(pad_token_id=60)))
    words = ["check", "model", str(path), "--json", "--out", str(out)]

    assert app.run(words) == 0
    stdout, stderr = capfd.readouterr()
    report = json.loads(stdout)
    assert (report["ok"], report["verb"]) == (True, "check model")
    assert json.loads(out.read_text()) == report
    assert "Loading weights" not in stderr

    gate_and_up_swapped(monkeypatch)
    assert app.run(words) == 1
    report = json.loads(capfd.readouterr().out)
    broken = {c["name"].rpartition(": ")[2] for c in report["checks"] if not c["ok"]}
    assert broken == PARITY


@pytest.mark.parametrize("name", ["qwen4", "qwen3_moe", "no/such/config.json"])
def test_a_name_that_stands_for_nothing_is_a_wrong_request(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        list(check_model(["qwen3", name]))
    assert caught.value.next_step
    is_path = name.endswith(".json")
    assert ("pith add-model NAME --config config.json" in caught.value.next_step) != is_path
    if not is_path:
        assert caught.value.faults[0].nearest[0] == "qwen3"


@pytest.mark.parametrize("text", ["[]", "{", '{"model_type": "qwen3"}', '{"model_type": "mamba"}'])
def test_a_config_that_pith_refuses_is_a_wrong_request(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RequestError):
        list(check_model([str(path)]))


def test_without_transformers_nothing_is_said_to_hold(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert app.run(["check", "model", "qwen3"]) == UnavailableError.exit_status
    assert "pip install -e '.[dev]'" in capsys.readouterr().err


def test_a_model_that_transformers_lacks_cannot_be_checked(monkeypatch: Patch) -> None:
    transformers = importlib.import_module("transformers")
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {"llama": object})
    with pytest.raises(UnavailableError, match="model_type 'qwen3"):
        list(check_model(["qwen3"]))
