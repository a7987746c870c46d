"""Auxiliary losses ride on the router weights and reach all logits, once; loads are recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.groups import summing
from pith.layer.balance import StepLoad, attach_losses, count_pairs, z_loss
from pith.layer.protocol import Context, RouterLosses
from pith.ops import choose

MakeContext = Callable[..., Context]
ByDefinition = Callable[..., tuple[Tensor, Tensor]]
NUM_EXPERTS, LENGTH = 6, 5


def draw_logits(seed: int) -> Tensor:
    """Of 3 sequences of 5 tokens, each seed leaning to other experts."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(15, NUM_EXPERTS, dtype=torch.float64, generator=generator)
    logits_TE[:, seed % NUM_EXPERTS] += 1
    return logits_TE.requires_grad_()


def attach(logits_TE: Tensor, context: Context, *, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(weights as they were, weights with the losses on them, ids)."""
    probs_TE, weights_TK, ids_TK = choose("cpu").topk_route(logits_TE, k=2, normalize=True)
    ridden_TK = attach_losses(weights_TK, logits_TE, probs_TE, ids_TK, context, layer=layer)
    return weights_TK, ridden_TK, ids_TK


def assert_logits_receive(
    wanted_loss: Tensor, logits_TE: Tensor, weights_TK: Tensor, ridden_TK: Tensor
) -> None:
    """The gradient of `ridden_TK` is that of the plain weights and of the loss by definition."""
    assert torch.equal(ridden_TK, weights_TK)
    upstream_TK = torch.linspace(-1, 1, weights_TK.numel(), dtype=torch.float64).view_as(weights_TK)
    (found,) = torch.autograd.grad(ridden_TK, logits_TE, upstream_TK, retain_graph=True)
    (wanted,) = torch.autograd.grad((weights_TK * upstream_TK).sum() + wanted_loss, logits_TE)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scales", [(0.37, 0.0), (0.0, 0.51), (0.37, 0.51)])
@pytest.mark.parametrize("scope", ["sequence", "micro-batch", "global-batch"])
def test_value_gradient_and_load_equal_the_definition(
    *,
    scope: Any,
    scales: tuple[float, float],
    make_context: MakeContext,
    records: Any,
    losses_by_definition: ByDefinition,
) -> None:
    others = torch.tensor([0, 0, 5, 5, 5, 1])  # what another rank sent where
    counts = count_pairs(others, first_expert=0, num_experts=NUM_EXPERTS)
    losses = RouterLosses(scope, *scales, load=StepLoad(lambda own_E: own_E + counts))
    logits_TE = draw_logits(2)
    weights_TK, ridden_TK, ids_TK = attach(logits_TE, make_context(LENGTH, losses), layer=4)

    sequences = [slice(b * LENGTH, (b + 1) * LENGTH) for b in range(3)]
    groups = {
        "sequence": [(rows, ids_TK[rows]) for rows in sequences],
        "micro-batch": [(slice(0, 15), ids_TK)],
        "global-batch": [(slice(0, 15), torch.cat((ids_TK.flatten(), others)))],
    }
    values = {name: losses_by_definition(logits_TE, groups[name]) for name in groups}
    balance, z = values[scope]
    assert_logits_receive(scales[0] * balance + scales[1] * z, logits_TE, weights_TK, ridden_TK)
    assert len({round(other.item(), 4) for other, _ in values.values()}) == 3
    ((layer, load, *found),) = records.entries
    assert layer == 4
    assert load == [(ids_TK == e).sum().item() for e in range(NUM_EXPERTS)]
    assert sum(load) == 15 * 2
    assert found == pytest.approx([balance.item(), z.item()], rel=1e-12)


def rank_over_a_step(make_context: MakeContext, records: Any) -> list[Any]:
    """Two layers, three micro-batches; rank 1 wants no gradient and must take part all the same."""
    rank, results = dist.get_rank(), []
    load = StepLoad(summing(dist.group.WORLD))
    losses = RouterLosses("global-batch", balance_scale=0.7 * (1 - rank), load=load)
    for micro in range(3):
        for layer in (1, 3):
            logits_TE = draw_logits(100 * layer + 10 * micro + rank)
            _, ridden_TK, _ = attach(logits_TE, make_context(LENGTH, losses), layer=layer)
            (grad,) = torch.autograd.grad(ridden_TK.sum(), logits_TE)
            results.append((layer, micro, grad, *records.entries[-1][2:]))
    return results


def test_a_global_batch_over_ranks_and_micro_batches_equals_one_process(
    *,
    run_ranks: Callable[..., list[Any]],
    make_context: MakeContext,
    records: Any,
    losses_by_definition: ByDefinition,
) -> None:
    by_rank = run_ranks(2, rank_over_a_step, make_context, records)
    for rank, results in enumerate(by_rank):
        assert len(results) == 6
        for layer, micro, grad, balance, _ in results:
            logits = {
                (m, r): draw_logits(100 * layer + 10 * m + r)
                for m in range(micro + 1)
                for r in range(2)
            }
            ids = [attach(each, make_context(LENGTH))[2] for each in logits.values()]
            own_TE = logits[micro, rank]
            wanted, _ = losses_by_definition(own_TE, [(slice(0, 15), torch.cat(ids))])
            weights_TK, _, own_ids = attach(own_TE, make_context(LENGTH))
            loss = weights_TK.sum() + 0.7 * (1 - rank) * wanted
            (wanted_grad,) = torch.autograd.grad(loss, own_TE)
            torch.testing.assert_close(grad, wanted_grad, rtol=1e-12, atol=1e-14)
            assert balance == pytest.approx(wanted.item(), rel=1e-12)
            alone, _ = losses_by_definition(own_TE, [(slice(0, 15), own_ids)])
            assert abs(balance - alone.item()) > 1e-3


def test_a_step_load_keeps_layers_apart_and_totals_already_given() -> None:
    load = StepLoad(lambda counts: 2 * counts)
    first = load.add(0, torch.tensor([1, 0]))
    assert load.add(7, torch.tensor([0, 5])).tolist() == [0, 10]
    assert load.add(0, torch.tensor([0, 3])).tolist() == [2, 6]
    assert first.tolist() == [2, 0]


def test_a_balance_gradient_without_its_global_load_is_refused(
    make_context: MakeContext, records: Any
) -> None:
    attach(draw_logits(0), make_context(LENGTH, RouterLosses("global-batch")))
    assert len(records.entries) == 1
    losses = RouterLosses("global-batch", balance_scale=0.1)
    with pytest.raises(AssertionError, match="needs its load"):
        attach(draw_logits(0), make_context(LENGTH, losses))


def test_every_probability_receives_a_gradient(make_context: MakeContext) -> None:
    probs_TE = torch.full((4, 5), 0.2, requires_grad=True)
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]])
    weights_TK = torch.full((4, 2), 0.2, requires_grad=True)
    context = make_context(4, RouterLosses(balance_scale=2.0))
    logits_TE = probs_TE.detach().log()
    attach_losses(weights_TK, logits_TE, probs_TE, ids_TK, context, layer=0).sum().backward()
    fractions = torch.tensor([4, 1, 1, 1, 1]) / 8
    torch.testing.assert_close(probs_TE.grad, (2.0 * 5 * fractions / 4).expand(4, 5))
    assert weights_TK.grad.eq(1).all()


@pytest.mark.parametrize("scope", ["sequence", "micro-batch", "global-batch"])
def test_perfect_balance_is_one_and_collapse_is_the_number_of_experts(
    scope: Any, make_context: MakeContext, records: Any
) -> None:
    context = make_context(4, RouterLosses(scope, load=StepLoad(lambda counts: 2 * counts)))
    even_TE, even_TK = torch.full((4, 4), 0.25), torch.arange(4).view(4, 1)
    attach_losses(torch.ones(4, 1), even_TE, even_TE, even_TK, context, layer=0)
    collapsed_TE, collapsed_TK = torch.zeros(4, 4), torch.full((4, 1), 2)
    collapsed_TE[:, 2] = 1
    attach_losses(torch.ones(4, 1), even_TE, collapsed_TE, collapsed_TK, context, layer=1)
    found = [entry[:3] for entry in records.entries]
    assert found == [(0, [1, 1, 1, 1], 1.0), (1, [0, 0, 4, 0], 4.0)]


def test_scales_of_zero_record_and_send_no_gradient(
    make_context: MakeContext, records: Any
) -> None:
    weights_TK, ridden_TK, _ = attach(draw_logits(2), make_context(LENGTH))
    assert ridden_TK is weights_TK
    assert len(records.entries) == 1


def test_the_z_loss_is_taken_in_float32_and_survives_large_logits() -> None:
    narrow = torch.full((3, 8), 1000.0).bfloat16()
    assert z_loss(narrow).dtype == torch.float32
    exact = (1000 + torch.tensor(8.0, dtype=torch.float64).log()) ** 2
    torch.testing.assert_close(z_loss(narrow).double(), exact, rtol=1e-6, atol=0)
    assert z_loss(narrow.double()).dtype == torch.float64


def test_counting_skips_foreign_experts() -> None:
    ids = torch.tensor([[0, 3, 3], [5, 2, 0]])
    assert count_pairs(ids, first_expert=0, num_experts=6).tolist() == [
        [1, 0, 0, 2, 0, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert count_pairs(ids.flatten(), first_expert=2, num_experts=2).tolist() == [1, 2]
