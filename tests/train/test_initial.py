"""Initial weights: one function of seed, name, expert and element, whatever the layout."""

import hashlib
import math

import pytest
import torch

from pith.arch.parameter import ParameterSpec, Role
from pith.train import initial
from pith.train.initial import fill, philox4x32, values

MATRIX = ParameterSpec("layers.0.mlp.up_proj.weight", (12, 10), Role.MATRIX, 0, std=0.02)
EXPERTS = ParameterSpec("layers.0.mlp.experts.up_proj.weight", (6, 5, 7), Role.EXPERTS, 0, std=0.5)
VECTOR = ParameterSpec("layers.0.dt_bias", (9,), Role.BIAS, 0, std=1.0)
ONES = ParameterSpec("layers.0.norm.weight", (5,), Role.NORM, 0, fill=1.0)


def drawn(spec: ParameterSpec, *, seed: int = 1, dtype: torch.dtype = torch.float32):
    tensor = torch.full(spec.shape, math.nan, dtype=dtype)
    fill(tensor, spec, seed=seed)
    return tensor


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in the paper, one block, plain Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 % 2**32,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def scalar_value(spec: ParameterSpec, i: int, *, seed: int, expert: int) -> float:
    digest = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    key = [int.from_bytes(digest[j : j + 4], "little") for j in (0, 4)]
    words = scalar_philox([i // 4 % 2**32, i // 4 // 2**32, expert, 0], key)
    first, second = words[i % 4 // 2 * 2 :][:2]
    radius = math.sqrt(-2 * math.log((first + 0.5) / 2**32))
    turn = math.cos if i % 2 == 0 else math.sin
    return spec.std * radius * turn(2 * math.pi * second / 2**32)


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_test_vectors(counter, key, wanted):
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    found = philox4x32(words, key=tuple(int(word, 16) for word in key.split()))
    assert [f"{int(word):08x}" for word in found] == wanted.split()


@pytest.mark.parametrize("start", [0, 1, 4 * 2**32 - 3, 7 * 2**32 + 2])
def test_values_equal_a_scalar_computation(start):
    spec = ParameterSpec("w", (1, 2**40), Role.EXPERTS, 0, std=0.02)
    found = values(spec, start, start + 9, seed=7, expert=3)
    wanted = [scalar_value(spec, start + i, seed=7, expert=3) for i in range(9)]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-7, atol=0)


def test_moments_are_those_of_the_normal_distribution():
    spec = ParameterSpec("w", (1000, 1000), Role.MATRIX, 0, std=0.02)
    x = drawn(spec).double() / spec.std
    n = x.numel()
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert 4.0 < x.abs().max() < 6.8
    neighbours = (x.view(-1)[1:] * x.view(-1)[:-1]).mean()
    assert abs(neighbours) < 5 / n**0.5


def test_no_two_experts_layers_or_seeds_start_equal():
    other_layer = ParameterSpec(
        "layers.1.mlp.experts.up_proj.weight", EXPERTS.shape, Role.EXPERTS, 1, std=0.5
    )
    tensors = (drawn(EXPERTS), drawn(other_layer), drawn(EXPERTS, seed=2))
    parts = torch.cat([tensor.flatten(1) for tensor in tensors])
    assert len(parts.unique()) == parts.numel()


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_the_chunk_size_changes_nothing(chunk, monkeypatch):
    wanted = drawn(MATRIX), drawn(EXPERTS)
    monkeypatch.setattr(initial, "CHUNK", chunk)
    assert torch.equal(drawn(MATRIX), wanted[0])
    assert torch.equal(drawn(EXPERTS), wanted[1])


@pytest.mark.parametrize(("start", "stop"), [(0, 120), (0, 1), (3, 4), (5, 17), (118, 120), (8, 8)])
def test_a_slice_equals_the_whole(start, stop):
    assert torch.equal(values(MATRIX, start, stop, seed=1), drawn(MATRIX).view(-1)[start:stop])


@pytest.mark.parametrize("spec", [MATRIX, EXPERTS, VECTOR, ONES], ids=lambda spec: spec.name)
def test_every_cut_in_row_shards_equals_the_rows_of_the_whole(spec):
    whole = drawn(spec)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            shard = torch.full((stop - start, *spec.shape[1:]), math.nan)
            fill(shard, spec, seed=1, first_row=start)
            assert torch.equal(shard, whole[start:stop]), (start, stop)


def test_an_expert_is_drawn_by_its_global_number():
    one = values(EXPERTS, 0, 35, seed=1, expert=4).view(5, 7)
    assert torch.equal(one, drawn(EXPERTS)[4])


def test_views_of_one_fused_buffer_are_filled_in_place():
    fused = torch.full((6, 10, 7), math.nan)
    fill(fused[:, 5:], EXPERTS, seed=1)
    assert torch.equal(fused[:, 5:], drawn(EXPERTS))
    assert fused[:, :5].isnan().all()


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_no_spread_means_the_constant(value, shape):
    spec = ParameterSpec("layers.0.norm.weight", shape, Role.NORM, 0, fill=value)
    assert torch.equal(drawn(spec), torch.full(shape, value))
    assert torch.equal(values(spec, 1, 3, seed=1), torch.full((2,), value))


def test_one_dimensional_parameters_can_be_drawn():
    assert torch.equal(drawn(VECTOR), values(VECTOR, 0, 9, seed=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_round_the_float32_value(dtype):
    assert torch.equal(drawn(MATRIX, dtype=dtype), drawn(MATRIX).to(dtype))


def test_a_parameter_that_wants_a_gradient_is_filled_without_recording():
    parameter = torch.nn.Parameter(torch.empty(MATRIX.shape))
    fill(parameter, MATRIX, seed=1)
    assert parameter.grad_fn is None
    assert torch.equal(parameter, drawn(MATRIX))


@pytest.mark.parametrize(
    ("shape", "spec", "first_row"),
    [
        ((12, 9), MATRIX, 0),
        ((13, 10), MATRIX, 0),
        ((12, 10), MATRIX, 1),
        ((3, 10), MATRIX, -1),
        ((0, 10), MATRIX, 13),
        ((6, 5, 6), EXPERTS, 0),
        ((3, 5, 7), EXPERTS, 4),
        ((6,), ONES, 0),
    ],
)
def test_rows_that_are_not_those_of_the_parameter_are_refused_untouched(shape, spec, first_row):
    tensor = torch.full(shape, 5.0)
    with pytest.raises(AssertionError):
        fill(tensor, spec, seed=1, first_row=first_row)
    assert tensor.eq(5.0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_to_float32_rounding():
    spec = ParameterSpec("w", (3, 1000, 1000), Role.EXPERTS, 0, std=0.02)
    tensor = torch.empty(spec.shape, device="cuda")
    fill(tensor, spec, seed=1)
    torch.testing.assert_close(tensor.cpu(), drawn(spec), rtol=2e-7, atol=0)
