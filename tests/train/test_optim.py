"""AdamW by role, against the formula written out in float64."""

import math

import pytest
import torch

from pith.arch.parameter import ParameterSpec, Role
from pith.errors import RequestError
from pith.train.optim import build_optimizer, clip_coefficient, set_learning_rate

RECIPE = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SPECS = {role.value: ParameterSpec(role.value, (4, 3), role, None) for role in Role}
DECAYED = {"embedding", "head", "matrix", "experts", "router"}


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(spec.shape, generator=generator, dtype=dtype))
        for name, spec in SPECS.items()
    }


def built(named, **changes):
    return build_optimizer(named, SPECS, **({"lr": 1e-2, **RECIPE} | changes))


def by_hand(start, gradients, rates, *, decay):
    """AdamW, Loshchilov and Hutter, with decay decoupled and scaled by the rate."""
    (beta_1, beta_2), eps = RECIPE["betas"], RECIPE["eps"]
    x, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        x -= lr * decay * x
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        x -= lr * (m / (1 - beta_1**t)) / ((v / (1 - beta_2**t)).sqrt() + eps)
    return x


@pytest.mark.parametrize("name", list(SPECS))
def test_each_role_follows_the_formula_with_its_own_decay(name):
    named = parameters()
    start = named[name].detach().clone()
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(start.shape, generator=generator).double() for _ in range(5)]
    rates = [1e-3, 1e-2, 3e-2, 1e-2, 5e-3]
    optimizer = built(named)
    for gradient, lr in zip(gradients, rates, strict=True):
        set_learning_rate(optimizer, lr)
        named[name].grad = gradient
        optimizer.step()
    wanted = by_hand(start, gradients, rates, decay=0.1 if name in DECAYED else 0.0)
    torch.testing.assert_close(named[name].detach(), wanted, rtol=1e-12, atol=1e-14)


def test_every_parameter_is_in_exactly_one_group():
    named = parameters()
    groups = built(named).param_groups
    found = {group["weight_decay"]: {id(p) for p in group["params"]} for group in groups}
    assert found == {
        0.1: {id(named[name]) for name in DECAYED},
        0.0: {id(named[name]) for name in ("norm", "bias")},
    }


@pytest.mark.parametrize("names", [["norm"], []])
def test_a_rank_may_own_only_norms_or_nothing(names):
    named = {name: parameters()[name] for name in names}
    optimizer = built(named)
    optimizer.step()
    found = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert found == {id(tensor): 0.0 for tensor in named.values()}


def test_master_weights_and_moments_are_float32():
    named = parameters(torch.float32)
    optimizer = built(named)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    assert len(moments) == 2 * len(SPECS)
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_the_learning_rate_reaches_every_group():
    optimizer = built(parameters())
    set_learning_rate(optimizer, 0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]


def test_an_unknown_optimizer_is_refused_by_name():
    with pytest.raises(RequestError, match=r"optimizer\.name.*found sgdw.*wanted adamw"):
        built(parameters(), name="sgdw")


@pytest.mark.parametrize(
    ("norm", "clip", "wanted"),
    [(2.0, 1.0, 0.5), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (7.0, 0.0, 1.0)],
)
def test_clipping_brings_the_norm_down_to_the_threshold_and_never_up(norm, clip, wanted):
    assert clip_coefficient(norm, clip) == wanted


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_non_finite_norm_is_never_clipped(norm):
    with pytest.raises(AssertionError):
        clip_coefficient(norm, 1.0)
