"""The global batch in one piece: what a step computes, by definition and by plain autograd."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pith.comm.exchange import LocalExchange
from pith.config import Recipe
from pith.data.loader import Batch
from pith.layer.protocol import Context, Parts, Routing
from pith.models.qwen3 import Qwen3Stage
from pith.ops import choose
from pith.ops.cross_entropy import NOT_COUNTED
from pith.train.initial import fill
from pith.train.step import RoutingMeter

Weights = dict[str, Tensor]


def initial(recipe: Recipe) -> Weights:
    """The weights that a run starts from."""
    weights = {}
    for spec in recipe.architecture.parameters():
        weights[spec.name] = torch.empty(spec.shape, dtype=torch.float64)
        fill(weights[spec.name], spec, seed=recipe.training.seed)
    return weights


def sequence_balance(probs_NSE: Tensor, ids_NSK: Tensor) -> Tensor:
    """E * sum_e f_e * P_e of each sequence (arXiv 2405.04434), averaged."""
    pairs = zip(probs_NSE, ids_NSK, strict=True)
    return torch.stack([one_balance(probs_SE, [ids_SK]) for probs_SE, ids_SK in pairs]).mean()


def one_balance(probs_SE: Tensor, ids: Sequence[Tensor]) -> Tensor:
    """E * sum_e f_e * P_e: P over `probs_SE` [..., E], f over all of `ids`."""
    num_experts = probs_SE.shape[-1]
    chosen = torch.cat([some.flatten() for some in ids])
    fraction_E = chosen.bincount(minlength=num_experts).double() / len(chosen)
    return num_experts * (fraction_E * probs_SE.flatten(0, -2).mean(0)).sum()


def cut_balance(probs_NSE: Tensor, ids_NSK: Tensor, recipe: Recipe, world_size: int) -> Tensor:
    """The balance loss of a batch cut as in a run of `world_size` ranks, averaged over the cut.

    Data rank d takes a run of neighbouring sequences, its micro-batches one after another. In the
    global batch f counts micro-batches up to this one, of all data ranks (arXiv 2501.11873).
    """
    plan = recipe.batch(world_size)
    shape = (plan.data_ranks, plan.num_micro_batches, plan.micro_batch_size)
    probs = probs_NSE.unflatten(0, shape)
    ids = ids_NSK.unflatten(0, shape)
    whole = recipe.balance.scope == "global-batch"
    losses = [
        one_balance(probs[d, i], [ids[:, : i + 1] if whole else ids[d, i]])
        for d in range(plan.data_ranks)
        for i in range(plan.num_micro_batches)
    ]
    return torch.stack(losses).mean()


@dataclass
class Whole:
    """What one step finds, before clipping."""

    loss: float  # mean over counted labels
    balance: float  # mean over routed layers
    z: float  # mean over routed layers and tokens of logsumexp(logits)^2 (arXiv 2202.08906)
    grads: Weights
    load_LE: list[list[int]]


@dataclass
class _Router:
    """What one router computed, with its graph."""

    logits_NSE: Tensor
    ids_NSK: Tensor

    def balance(self, recipe: Recipe, world_size: int) -> Tensor:
        probs_NSE = self.logits_NSE.softmax(-1)
        if recipe.balance.scope in ("sequence", "none"):
            return sequence_balance(probs_NSE, self.ids_NSK)
        return cut_balance(probs_NSE, self.ids_NSK, recipe, world_size)

    def z(self) -> Tensor:
        return self.logits_NSE.logsumexp(-1).square().mean()


def whole_batch(
    recipe: Recipe,
    weights: Weights,
    batch: Batch,
    *,
    world_size: int | None = None,
    routing: Routing | None = None,
) -> Whole:
    """Mean token loss plus the routers' losses by autograd in float64, as one forward pass.

    `world_size` matters where the scope of the balance loss depends on the cut of the batch.
    """
    model = _model(recipe, weights)
    shape = batch.tokens_NS.shape
    routers = _watch_routers(model, shape)
    tokens_NS, labels_NS = torch.from_numpy(batch.tokens_NS), torch.from_numpy(batch.labels_NS)
    cos, sin = model.rotary(torch.arange(shape[1])[None])
    logits_NSV = model(tokens_NS, Context(cos, sin, RoutingMeter(), routing=routing))
    counted_NS = labels_NS != NOT_COUNTED
    balances = [router.balance(recipe, world_size) for router in routers.values()]
    zs = [router.z() for router in routers.values()]
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
    objective = loss * 0
    if counted_NS.any():
        loss = functional.cross_entropy(logits_NSV[counted_NS], labels_NS[counted_NS])
        objective = loss + recipe.balance_coefficient * torch.stack(balances).sum()
        objective = objective + recipe.balance.z_loss * torch.stack(zs).sum()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(objective, list(named.values()), materialize_grads=True)
    arch = recipe.architecture
    load_LE = [[0] * arch.num_experts for _ in range(arch.num_layers)]
    for number, router in routers.items():
        load_LE[number] = router.ids_NSK.flatten().bincount(minlength=arch.num_experts).tolist()
    return Whole(
        loss=float(loss.detach()),
        balance=float(torch.stack(balances).mean().detach()),
        z=float(torch.stack(zs).mean().detach()),
        grads=dict(zip(named, grads, strict=True)),
        load_LE=load_LE,
    )


def optimizer_step(weights: Weights, grads: Weights, *, sgd: bool = False) -> Weights:
    """The weights after torch's optimizer has taken a first step of rate 0.01 on `grads`, clipped
    to norm 0.5; AdamW decays all but norms by 0.1."""
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    assert norm > 0.5, "clipping should bite"
    after = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    for name, weight in after.items():
        weight.grad = grads[name] * (0.5 / norm)
    optimizer: torch.optim.Optimizer
    if sgd:
        optimizer = torch.optim.SGD(after.values(), lr=0.01)
    else:
        norms = [weight for weight in after.values() if weight.ndim == 1]
        others = [weight for weight in after.values() if weight.ndim > 1]
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    optimizer.step()
    return {name: weight.detach() for name, weight in after.items()}


def _model(recipe: Recipe, weights: Weights) -> Qwen3Stage:
    arch = recipe.architecture
    model = Qwen3Stage(
        arch,
        range(arch.num_layers),
        is_first=True,
        is_last=True,
        parts=Parts(choose("cpu"), LocalExchange(), None, arch.num_experts, 0),
        dtype=torch.float64,
        device="cpu",
    )
    model.load_state_dict(weights, strict=not arch.tie_word_embeddings)
    if arch.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def _watch_routers(model: Qwen3Stage, shape: tuple[int, ...]) -> dict[int, _Router]:
    """What each router computes in the next forward pass, by layer."""
    routers: dict[int, _Router] = {}
    for number, layer in enumerate(model.layers.values()):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda gate, inputs, outputs, number=number: routers.update(
                    {
                        number: _Router(
                            (inputs[0] @ gate.weight.t()).unflatten(0, shape),
                            outputs[0].unflatten(0, shape),
                        )
                    }
                )
            )
    return routers
