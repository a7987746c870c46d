"""The global batch in one piece: what a step computes, by definition and by plain autograd.

One forward pass over all sequences in float64 on the CPU, without engine, schedule, gradient sink,
process group or sharding, and with the reference operators; then a clip by the norm and torch's
AdamW. It is what every layout is compared with.

Shape letters: N sequences of the global batch of S tokens, K top-k, E experts, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pith.arch.parameter import Role
from pith.comm.exchange import LocalExchange
from pith.config import Recipe
from pith.data.loader import Batch
from pith.layer.protocol import Context, Parts, Routing, Stage
from pith.layer.router import Router
from pith.ops import REFERENCE, choose, operator_names
from pith.ops.cross_entropy import NOT_COUNTED
from pith.train.build import build_stage
from pith.train.initial import fill
from pith.verify.probe import Probe

Weights = dict[str, Tensor]  # by canonical name

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Whole:
    """What one step finds, before clipping. Losses of routers are None without routers."""

    loss: float  # mean over counted labels
    balance: float | None  # mean over routed layers
    z: float | None  # mean over routed layers and tokens of logsumexp(logits)^2 (arXiv 2202.08906)
    grads: Weights
    load_LE: list[list[int]]
    losses_N: list[float]  # the sum of each sequence

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return float(torch.cat([grad.flatten() for grad in self.grads.values()]).norm())


def initial(recipe: Recipe) -> Weights:
    """The weights that a run starts from, in float64."""
    weights = {}
    for spec in recipe.architecture.parameters():
        weights[spec.name] = torch.empty(spec.shape, dtype=torch.float64)
        fill(weights[spec.name], spec, seed=recipe.training.seed)
    return weights


def random_batch(
    num_sequences: int, *, length: int, vocab_size: int, seed: int, wholly_masked: int = 2
) -> Batch:
    """Random tokens and labels, the labels masked unevenly: all of the first `wholly_masked`
    sequences, but never of the last one, then ever fewer of each."""
    draw = np.random.default_rng(seed)
    tokens_NS = draw.integers(0, vocab_size, (num_sequences, length))
    labels_NS = draw.integers(0, vocab_size, (num_sequences, length))
    whole = min(wholly_masked, num_sequences - 1)
    labels_NS[:whole] = NOT_COUNTED
    for row in range(whole, num_sequences):
        labels_NS[row, : max(0, length - 1 - row)] = NOT_COUNTED
    return Batch(tokens_NS, labels_NS, np.arange(num_sequences))


def whole_batch(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    batch: Batch,
    *,
    world_size: int | None = None,
    routing: Routing | None = None,
    probe: Probe | None = None,
) -> Whole:
    """Mean token loss plus the routers' losses by autograd, as one forward pass.

    `world_size` matters where the scope of the balance loss depends on the cut of the batch.
    `probe` sees the passes with gradients of the sum of token losses, as a layout has them.
    """
    stage = _model(recipe, weights)
    routers = _watch_routers(stage, batch.tokens_NS.shape)
    if probe is not None:
        probe.attach(stage)
    tokens_NS, labels_NS = torch.from_numpy(batch.tokens_NS), torch.from_numpy(batch.labels_NS)
    context = Context(
        *stage.rotary(torch.arange(tokens_NS.shape[1])[None]), _Deaf(), routing=routing
    )
    logits_NSV = cast(nn.Module, stage)(tokens_NS, context)
    losses_NS = functional.cross_entropy(
        logits_NSV.flatten(0, 1), labels_NS.flatten(), reduction="none", ignore_index=NOT_COUNTED
    ).view_as(labels_NS)
    balances = [router.balance(recipe, world_size) for router in routers.values()]
    zs = [router.z() for router in routers.values()]
    count = max(1, batch.num_counted)
    # The sum over labels as in a layout; without one that counts, nothing is learnt.
    objective = losses_NS.sum()
    if batch.num_counted:
        for losses, weight in (
            (balances, recipe.balance_coefficient),
            (zs, recipe.balance.z_loss),
        ):
            objective = objective + count * weight * sum(losses)
    return Whole(
        loss=float(losses_NS.sum().detach()) / count,
        balance=_mean(balances),
        z=_mean(zs),
        grads={name: grad / count for name, grad in _gradients(recipe, stage, objective).items()},
        load_LE=_loads(recipe, routers),
        losses_N=losses_NS.detach().sum(1).tolist(),
    )


def _gradients(recipe: Recipe, stage: Stage, objective: Tensor) -> Weights:
    named = dict(stage.named_parameters())
    found = torch.autograd.grad(objective, list(named.values()), materialize_grads=True)
    grads = dict(zip(named, found, strict=True))
    if recipe.architecture.tie_word_embeddings:
        grads[EMBEDDING] = grads[EMBEDDING] + grads.pop(HEAD)
    return grads


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


def cut_balance(
    probs_NSE: Tensor, ids_NSK: Tensor, recipe: Recipe, world_size: int | None
) -> Tensor:
    """The balance loss of a batch cut as in a run of `world_size` ranks, averaged over the cut.

    Data rank d takes a run of neighbouring sequences, its micro-batches one after another. In the
    global batch f counts micro-batches up to this one, of all data ranks (arXiv 2501.11873).
    """
    plan = recipe.batch(world_size)
    shape = (plan.data_ranks, plan.num_micro_batches, plan.micro_batch_size)
    probs = probs_NSE.view(*shape, *probs_NSE.shape[1:])
    ids = ids_NSK.view(*shape, *ids_NSK.shape[1:])
    whole = recipe.balance.scope == "global-batch"
    losses = [
        one_balance(probs[d, i], [ids[:, : i + 1] if whole else ids[d, i]])
        for d in range(plan.data_ranks)
        for i in range(plan.num_micro_batches)
    ]
    return torch.stack(losses).mean()


class Descent:
    """The weights under clipping by the global norm and torch's AdamW; norms and biases are not
    decayed."""

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        roles = {spec.name: spec.role for spec in recipe.architecture.parameters()}
        whole = [w for name, w in self._weights.items() if roles[name] in (Role.NORM, Role.BIAS)]
        others = [w for w in self._weights.values() if all(w is not each for each in whole)]
        options = recipe.optimizer
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((whole, 0.0), (others, options.weight_decay))
            if params
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=options.lr, betas=options.betas, eps=options.eps
        )

    def step(self, grads: Mapping[str, Tensor], *, lr: float) -> Weights:
        """Take a step of rate `lr` on clipped `grads`; the weights after it."""
        for name, weight in self._weights.items():
            weight.grad = grads[name].clone()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return {name: weight.detach().clone() for name, weight in self._weights.items()}


def clipped(grads: Mapping[str, Tensor], clip: float | None) -> Weights:
    """`grads` times what makes their global norm at most `clip`; None: as they are."""
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    scale = 1.0 if clip is None or norm <= clip else clip / norm
    return {name: grad * scale for name, grad in grads.items()}


@dataclass(frozen=True, slots=True)
class _Watched:
    """What one router computed, with its graph."""

    logits_NSE: Tensor
    ids_NSK: Tensor

    def balance(self, recipe: Recipe, world_size: int | None) -> Tensor:
        probs_NSE = self.logits_NSE.softmax(-1)
        if recipe.balance.scope in ("sequence", "none"):
            return sequence_balance(probs_NSE, self.ids_NSK)
        return cut_balance(probs_NSE, self.ids_NSK, recipe, world_size)

    def z(self) -> Tensor:
        return self.logits_NSE.logsumexp(-1).square().mean()


class _Deaf:
    """A meter that forgets: the routers are watched from outside."""

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        pass


def _model(recipe: Recipe, weights: Mapping[str, Tensor]) -> Stage:
    arch = recipe.architecture
    operators = choose("cpu", dict.fromkeys(operator_names(), REFERENCE))
    stage = build_stage(
        arch,
        range(arch.num_layers),
        is_first=True,
        is_last=True,
        parts=Parts(operators, LocalExchange(), None, arch.num_experts, 0),
        dtype=torch.float64,
    )
    module = cast(nn.Module, stage)
    module.to_empty(device="cpu")
    module.load_state_dict(weights, strict=not arch.tie_word_embeddings)
    if arch.tie_word_embeddings:
        stage.tie_to(stage.get_parameter(EMBEDDING))
    return stage


def _watch_routers(stage: Stage, shape: tuple[int, ...]) -> dict[int, _Watched]:
    """What each router computes in the next forward pass, by layer."""
    watched: dict[int, _Watched] = {}

    def keep(router: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        logits_TE = inputs[0] @ router.weight.t()
        ids_TK = outputs[0]
        watched[router.layer] = _Watched(logits_TE.view(*shape, -1), ids_TK.view(*shape, -1))

    for module in cast(nn.Module, stage).modules():
        if isinstance(module, Router):
            module.register_forward_hook(keep)
    return watched


def _loads(recipe: Recipe, routers: Mapping[int, _Watched]) -> list[list[int]]:
    """(token, slot) pairs per layer and expert; a row of zeros for a layer without experts."""
    num_choices = max(1, recipe.architecture.num_choices)
    load_LE = [[0] * num_choices for _ in range(recipe.architecture.num_layers)]
    for layer, router in routers.items():
        load_LE[layer] = router.ids_NSK.flatten().bincount(minlength=num_choices).tolist()
    return load_LE


def _mean(losses: Sequence[Tensor]) -> float | None:
    return float(torch.stack(list(losses)).mean().detach()) if losses else None
