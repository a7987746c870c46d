"""`pith check ops`: sound operators hold, and a broken one is exit 1 with its name."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import pith.ops
from pith.cli.app import run
from pith.ops import implementations, operator_names
from pith.verify.operators import check
from pith.verify.operators.definitions import DEFINITIONS

Operator = Callable[..., Any]


@pytest.fixture
def report_of(capsys) -> Callable[..., tuple[int, dict[str, Any]]]:
    """report_of("linear", ...): exit status and report of the command on the CPU."""

    def report(*words: str) -> tuple[int, dict[str, Any]]:
        status = run(["check", "ops", *words, "--device", "cpu", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return report


def test_every_implementation_of_every_operator_holds_in_every_type_it_serves(report_of) -> None:
    status, report = report_of()

    assert [c for c in report["checks"] if not c["ok"]] == []
    assert status == 0
    names = {c["name"] for c in report["checks"]}
    assert not names & set(report["data"]["not_served"])
    for operator in operator_names():
        for implementation in implementations(operator):
            for dtype in DEFINITIONS[operator].dtypes:
                name = f"{operator} {implementation} {str(dtype).removeprefix('torch.')}"
                assert name in names | set(report["data"]["not_served"])
    assert {"linear reference bfloat16 deferred", "grouped_linear library float32"} <= names
    assert report["data"]["not_served"] == [
        "grouped_linear library float64",
        "grouped_linear library float64 deferred",
    ]
    assert all(c["where"] and c["found"] and c["wanted"] for c in report["checks"])


class PatchedSink:
    """A sink that hands on to `sink` what `change` makes of a deferred closure, or runs it now."""

    def __init__(self, sink: Any, change: Callable[[Any], Any] | None) -> None:
        self.sink, self.change = sink, change

    def defer(self, parameter: Any, accumulate: Any) -> None:
        if self.change is None:
            accumulate(self.sink.main_grad(parameter))
        else:
            self.sink.defer(parameter, self.change(accumulate))


class DropSlots(torch.autograd.Function):
    """Rows of pairs whose gradient reaches a row from its first slot alone."""

    @staticmethod
    def forward(ctx, x, pairs):
        ctx.pairs = pairs
        return x[pairs.row_P]

    @staticmethod
    def backward(ctx, dy):
        padded = torch.cat([dy, dy.new_zeros(1, dy.shape[1])])
        return padded[ctx.pairs.position_RK[:, 0]], None


def twice(accumulate):
    def both(main):
        accumulate(main)
        accumulate(main)

    return both


def overwrite(accumulate):
    return lambda main: accumulate(main.zero_())


def cut_last_row(real: Operator, x: Tensor, *rest: Any, **options: Any) -> Tensor:
    out = real(x, *rest, **options)
    return torch.cat([out[:-1], 0 * out[-1:]])


def unwritten_rows(real: Operator, x: Tensor, weight: Tensor, counts: Tensor, **o: Any) -> Tensor:
    used, out = int(counts.sum()), torch.empty(len(x), weight.shape[1], dtype=x.dtype)
    if used == len(x):
        return real(x, weight, counts, **o)
    out[:used] = real(x[:used], weight, counts, **o)
    return out


def ids_otherwise(ids_of: Callable[[Tensor, int], Tensor]) -> Operator:
    """Routing by the experts that `ids_of(logits, k)` names."""

    def route(real: Operator, logits: Tensor, *, k: int, chosen_TK: Any = None, **o: Any) -> Any:
        ids = ids_of(logits.detach(), k) if chosen_TK is None else chosen_TK
        return real(logits, k=k, chosen_TK=ids, **o)

    return route


def by_falling(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def ties_to_the_higher(logits: Tensor, k: int) -> Tensor:
    return logits.shape[1] - 1 - by_falling(logits.flip(1), k)


def negative_zero_below(logits: Tensor, k: int) -> Tensor:
    return by_falling(torch.where((logits == 0) & logits.signbit(), -1e-30, logits), k)


def narrow_norm(real: Operator, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def without_mask(real: Operator, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    return ((q @ k.transpose(2, 3) * scale).softmax(-1) @ v).transpose(1, 2)


def unstable(real: Operator, ids: Tensor, counts: Tensor, **options: Any) -> Any:
    pairs = real(ids, counts, **options)
    return replace(pairs, pair_P=pairs.pair_P.flip(0), row_P=pairs.row_P.flip(0))


def mean_loss(real: Operator, logits: Tensor, labels: Tensor) -> Tensor:
    return real(logits, labels) / max(1, int((labels != -100).sum()))


BROKEN: dict[str, tuple[str, Operator]] = {
    "off by one": ("rope", lambda real, x, cos, sin: real(x, cos.roll(1, 1), sin.roll(1, 1))),
    "turned back": ("rope", lambda real, x, cos, sin: real(x, cos, -sin)),
    "gate and up swapped": ("swiglu", lambda real, gate, up: real(up, gate)),
    "no eps": ("rms_norm", lambda real, x, weight, eps: real(x, weight, 0.0)),
    "in the type of its input": ("rms_norm", narrow_norm),
    "sees the future": ("attention", without_mask),
    "no scale": ("attention", lambda real, q, k, v, *, scale: real(q, k, v, scale=1.0)),
    "in bf16": ("topk_route", ids_otherwise(lambda x, k: by_falling(x.bfloat16(), k))),
    "ties to the higher expert": ("topk_route", ids_otherwise(ties_to_the_higher)),
    "-0.0 below 0.0": ("topk_route", ids_otherwise(negative_zero_below)),
    "normalized always": ("topk_route", lambda real, x, **o: real(x, **o | {"normalize": True})),
    "last row dropped": ("linear", cut_last_row),
    "weight gradient twice": (
        "linear",
        lambda real, x, w, *, sink=None: real(x, w, sink=sink and PatchedSink(sink, twice)),
    ),
    "weight gradient at once": (
        "linear",
        lambda real, x, w, *, sink=None: real(x, w, sink=sink and PatchedSink(sink, None)),
    ),
    "weight gradient not accumulated": (
        "grouped_linear",
        lambda real, x, w, n, *, sink=None: real(
            x, w, n, sink=sink and PatchedSink(sink, overwrite)
        ),
    ),
    "unwritten rows": ("grouped_linear", unwritten_rows),
    "rows of the next expert": (
        "grouped_linear",
        lambda real, x, w, n, **o: real(x, w, n.roll(1), **o),
    ),
    "gradient of the sink to autograd too": (
        "embedding",
        lambda real, ids, w, *, sink=None: real(ids, w, sink=sink) + 0 * w.sum(),
    ),
    "next id": ("embedding", lambda real, ids, w, **o: real((ids + 1) % len(w), w, **o)),
    "unstable order": ("sort_pairs", unstable),
    "gradient of the first slot alone": ("gather_rows", lambda real, *a: DropSlots.apply(*a)),
    "weights without gradient": ("weighted_sum", lambda real, x, w, p: real(x, w.detach(), p)),
    "mean": ("cross_entropy", mean_loss),
    "ignored labels counted": (
        "cross_entropy",
        lambda real, logits, labels: real(logits, labels.clamp(min=0)),
    ),
    "NaN": ("swiglu", lambda real, gate, up: real(gate, up) + torch.nan),
    "raises": ("swiglu", lambda real, gate, up: real(gate, up[:, 1:])),
}


def break_operator(monkeypatch, operator: str, implementation: str, broken: Operator) -> None:
    module = import_module(f"pith.ops.{operator}.{implementation}")
    real = getattr(module, operator)
    monkeypatch.setattr(module, operator, lambda *args, **o: broken(real, *args, **o))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_operator_fails_by_name_beside_implementations_that_hold(
    monkeypatch, report_of, fault: str
) -> None:
    operator, broken = BROKEN[fault]
    break_operator(monkeypatch, operator, "reference", broken)

    status, report = report_of(operator)

    failed = [c["name"] for c in report["checks"] if not c["ok"]]
    assert status == 1
    assert failed
    assert all(name.startswith(f"{operator} reference ") for name in failed)
    assert [c["ok"] for c in report["checks"]] == sorted(c["ok"] for c in report["checks"])


def test_every_operator_is_broken_here_in_one_way_or_more() -> None:
    assert {operator for operator, _ in BROKEN.values()} == set(operator_names())


def test_what_only_a_sink_or_only_bf16_shows_is_found_there_alone(monkeypatch, report_of) -> None:
    for fault, names in (
        ("weight gradient twice", {"linear reference float64 deferred"}),
        ("in the type of its input", {"rms_norm reference bfloat16"}),
    ):
        operator, broken = BROKEN[fault]
        with monkeypatch.context() as context:
            break_operator(context, operator, "reference", broken)
            _, report = report_of(operator)
        failed = {c["name"] for c in report["checks"] if not c["ok"]}
        assert names <= failed
        assert all(name.endswith(("deferred", "bfloat16")) for name in failed)


def test_what_is_wrong_is_told_with_the_worst_case(monkeypatch, report_of) -> None:
    for fault, told in (
        ("NaN", "NaN or infinity in output; 9 of 10 cases failed"),
        ("raises", "RuntimeError: The size of tensor a"),
        ("unstable order", "other numbers in pair_P"),
        ("weight gradient at once", "gradient of weight before its slot is not zero"),
        ("gradient of the sink to autograd too", "gradient of weight, which autograd got too"),
    ):
        operator, broken = BROKEN[fault]
        with monkeypatch.context() as context:
            break_operator(context, operator, "reference", broken)
            _, report = report_of(operator)
        worst = report["checks"][0]
        assert told in worst["found"]
        assert "[" in worst["where"]


def test_a_broken_library_kernel_is_named_as_such(monkeypatch, report_of) -> None:
    break_operator(monkeypatch, "rms_norm", "library", lambda real, x, w, eps: real(x, w, 0.0))

    status, report = report_of("rms_norm")

    assert status == 1
    assert {c["name"].split()[1] for c in report["checks"] if not c["ok"]} == {"library"}


def test_a_new_implementation_is_checked_as_soon_as_it_is_listed(monkeypatch, report_of) -> None:
    kernel: Any = ModuleType("pith.ops.swiglu.library")
    kernel.swiglu = lambda gate, up: up.sigmoid() * up * gate
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setattr(pith.ops, "_LIBRARY_ON", {"swiglu": ("cuda",)})

    status, report = report_of("swiglu")

    assert status == 1
    assert {c["name"].split()[1] for c in report["checks"] if not c["ok"]} == {"library"}


def test_an_implementation_that_serves_nothing_and_an_operator_without_definition_fail(
    monkeypatch,
) -> None:
    monkeypatch.setattr(check.Subject, "serves", lambda self, case: False)
    (idle,) = check.check_operator("rope", device="cpu")
    (unknown,) = check.check_operator("convolution", device="cpu")

    assert (idle.ok, idle.name, idle.found) == (False, "rope reference", "no case that it serves")
    assert (unknown.ok, unknown.found) == (False, "no definition")


def test_unknown_operators_are_refused_at_once_with_near_ones(capsys) -> None:
    assert run(["check", "ops", "linera", "rope", "x"]) == 2

    told = capsys.readouterr().err
    assert "'linera'" in told
    assert "nearest valid: linear" in told
    assert "'x'" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there_is_exit_3() -> None:
    assert run(["check", "ops", "--device", "cuda"]) == 3
