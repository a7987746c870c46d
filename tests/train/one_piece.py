"""The global batch in one piece: what a step computes, by definition and by plain autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pith.comm.exchange import LocalExchange
from pith.config import Recipe
from pith.data.loader import Batch
from pith.layer.protocol import Context, Parts
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


def mean_balance(probs_NSE: Tensor, ids_TK: Tensor) -> Tensor:
    """E * sum_e f_e * P_e of each sequence (arXiv 2405.04434), averaged."""
    num_sequences, _, num_experts = probs_NSE.shape
    losses = []
    for probs_SE, ids_SK in zip(probs_NSE, ids_TK.chunk(num_sequences), strict=True):
        fraction_E = ids_SK.flatten().bincount(minlength=num_experts).double() / ids_SK.numel()
        losses.append(num_experts * (fraction_E * probs_SE.mean(0)).sum())
    return torch.stack(losses).mean()


@dataclass
class Whole:
    """What one step finds, before clipping."""

    loss: float  # mean over counted labels
    balance: float  # mean over routed layers and sequences
    grads: Weights
    load_LE: list[list[int]]


def whole_batch(recipe: Recipe, weights: Weights, batch: Batch) -> Whole:
    """Mean token loss, plus the balance losses' mean over sequences, by autograd in float64."""
    arch = recipe.architecture
    parts = Parts(choose("cpu"), LocalExchange(), None, arch.num_experts, 0)
    model = Qwen3Stage(
        arch,
        range(arch.num_layers),
        is_first=True,
        is_last=True,
        parts=parts,
        dtype=torch.float64,
        device="cpu",
    )
    model.load_state_dict(weights, strict=not arch.tie_word_embeddings)
    if arch.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    routed: dict[int, tuple[Tensor, Tensor]] = {}
    for number, layer in enumerate(model.layers.values()):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda gate, inputs, outputs, number=number: routed.update(
                    {number: ((inputs[0] @ gate.weight.t()).softmax(-1), outputs[0])}
                )
            )
    tokens_NS, labels_NS = torch.from_numpy(batch.tokens_NS), torch.from_numpy(batch.labels_NS)
    cos, sin = model.rotary(torch.arange(tokens_NS.shape[1])[None])
    logits_NSV = model(tokens_NS, Context(cos, sin, 0.0, RoutingMeter()))
    counted_NS = labels_NS != NOT_COUNTED
    balances, load_LE = [], [[0] * arch.num_experts for _ in range(arch.num_layers)]
    for number, (probs_TE, ids_TK) in routed.items():
        load_LE[number] = ids_TK.flatten().bincount(minlength=arch.num_experts).tolist()
        balances.append(mean_balance(probs_TE.unflatten(0, tokens_NS.shape), ids_TK))
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
    objective = loss * 0
    if counted_NS.any():
        loss = functional.cross_entropy(logits_NSV[counted_NS], labels_NS[counted_NS])
        objective = loss + recipe.balance_coefficient * torch.stack(balances).sum()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(objective, list(named.values()), materialize_grads=True)
    balance = float(torch.stack(balances).mean().detach())
    return Whole(float(loss.detach()), balance, dict(zip(named, grads, strict=True)), load_LE)
