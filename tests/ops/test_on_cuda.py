"""What only a GPU shows: its kernels at the sizes of a model, and the same bits twice."""

import pytest
import torch
from torch import Tensor

from pith.cli.app import run
from pith.ops import choose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16 = 6e-3  # relative error of a result that was rounded to bf16 once or twice


def draw(*shape: int, seed: int) -> Tensor:
    """bf16 values on CUDA."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().cuda()


def test_every_implementation_holds_on_the_gpu(capsys) -> None:
    status = run(["check", "ops", "--device", "cuda"])
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 4, 128), (4, 4, 64)])
def test_attention_of_a_model_equals_the_reference_on_the_cpu(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    heads = (num_heads, num_kv_heads, num_kv_heads)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        leaves = [draw(2, 256, h, head_dim, seed=i).to(device, dtype) for i, h in enumerate(heads)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        chosen = choose(device, {"attention": "reference"} if device == "cpu" else {})
        out = chosen.attention(*leaves, scale=head_dim**-0.5)
        out.backward(draw(*out.shape, seed=9).to(device, dtype))
        results.append([out.detach().cpu().double(), *(x.grad.cpu().double() for x in leaves)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= BF16 * wanted.norm()


def test_rows_travel_to_experts_and_back_with_the_same_bits_twice() -> None:
    operators = choose("cuda")
    ids_RK = torch.randint(16, (512, 4), generator=torch.Generator().manual_seed(0)).cuda()
    counts_e = ids_RK.flatten().bincount(minlength=16)
    x, weights = draw(512, 64, seed=0).requires_grad_(), draw(512, 4, seed=1).float()
    weights.requires_grad_()
    results = []
    for _ in range(2):
        x.grad = weights.grad = None
        pairs = operators.sort_pairs(ids_RK, counts_e, first_expert=0, num_experts=16)
        out = operators.weighted_sum(operators.gather_rows(x, pairs), weights, pairs)
        out.backward(draw(512, 64, seed=2))
        results.append((out.detach(), x.grad, weights.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
