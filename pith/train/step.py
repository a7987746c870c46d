"""One optimizer step: forward and backward through the table, reduce, clip, update."""

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch
from pith.engine.chunk import MicroBatch
from pith.engine.executor import Watch
from pith.layer.protocol import Context
from pith.train.build import Model
from pith.train.learning_rate import learning_rate
from pith.train.optim import clip_coefficient, set_learning_rate

NORM_PIECE = 1 << 16  # elements


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on every rank."""

    loss: float  # mean over the counted labels of the global batch
    balance_loss: float | None  # mean over routed layers and micro-batches, without coefficient
    grad_norm: float  # of the whole model, before clipping
    lr: float
    num_counted: int  # labels that count
    updated: bool  # False: something was not finite and no rank moved
    faulty_ranks: tuple[int, ...]
    load_LE: tuple[tuple[int, ...], ...]  # (token, slot) pairs per layer and expert
    memory_bytes: int  # the peak so far of the rank that needs most
    slots: tuple[str, ...]  # what this rank executed


@dataclass(slots=True)
class RoutingMeter:
    """Counts of one step, by layer."""

    loads: dict[int, Tensor] = field(default_factory=dict)
    balance: dict[int, Tensor] = field(default_factory=dict)
    num_records: int = 0

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor) -> None:
        self.num_records += 1
        if layer in self.loads:
            self.loads[layer] = self.loads[layer] + load_E
            self.balance[layer] = self.balance[layer] + balance_loss.detach()
        else:
            self.loads[layer], self.balance[layer] = load_E, balance_loss.detach()


class Trainer:
    """Takes steps. Holds no data order: the caller says which batch is next."""

    def __init__(self, recipe: Recipe, world: World, model: Model) -> None:
        self.recipe = recipe
        self.world = world
        self.model = model

    def step(self, index: int, batch: Batch, *, watch: Watch = lambda text: None) -> StepResult:
        """Train on the global batch `batch` as step `index`, counted from 0.

        `watch` is called with the text of each slot, and "optimizer", before it starts.
        """
        model, meter = self.model, RoutingMeter()
        num_counted = batch.num_counted
        model.parameters.gather()
        scale = self.recipe.balance_coefficient * num_counted / batch.labels_NS.size
        micro_batches = self._micro_batches(batch, balance_per_token=scale, meter=meter)
        execution = model.training.run(micro_batches, watch=watch)
        grads = model.parameters.reduce(scale=1.0 / max(1, num_counted))
        squares = sum_of_squares([grads[name] for name in sorted(model.owned)])
        totals = self._totals(_sum_losses(execution.losses), squares, meter)
        grad_norm = math.sqrt(totals.squares) if totals.squares >= 0 else math.nan
        lr = self._learning_rate(index)
        watch("optimizer")
        if not totals.faulty_ranks:
            self._update(grads, grad_norm, lr)
        model.parameters.release()
        return StepResult(
            loss=totals.loss / max(1, num_counted),
            balance_loss=totals.balance,
            grad_norm=grad_norm,
            lr=lr,
            num_counted=num_counted,
            updated=not totals.faulty_ranks,
            faulty_ranks=totals.faulty_ranks,
            load_LE=totals.load_LE,
            memory_bytes=totals.memory_bytes,
            slots=tuple(execution.slots),
        )

    def evaluate(self, batch: Batch) -> float:
        """The **sum** of the token losses on `batch`, weights untouched, equal on every rank.

        The batch has as many sequences as a training step.
        """
        self.model.parameters.gather()
        micro_batches = self._micro_batches(batch, balance_per_token=0.0, meter=RoutingMeter())
        losses = self.model.evaluation.run(micro_batches).losses
        total = self.world.sum(torch.tensor([_sum_losses(losses)], dtype=torch.float64))
        return float(total[0])

    def _micro_batches(
        self, batch: Batch, *, balance_per_token: float, meter: RoutingMeter
    ) -> list[MicroBatch]:
        """Cut this rank's sequences into micro-batches."""
        size, device = self.recipe.training.micro_batch_size, self.world.device
        tokens_NS = torch.from_numpy(batch.tokens_NS).to(device)
        labels_NS = torch.from_numpy(batch.labels_NS).to(device)
        length = tokens_NS.shape[1]
        stage = next(iter(self.model.stages.values()))
        cos_BSd, sin_BSd = stage.rotary(torch.arange(length, device=device)[None])
        context = Context(cos_BSd, sin_BSd, balance_per_token * size * length, meter)
        return [
            MicroBatch(tokens_BS, labels_BS, context)
            for tokens_BS, labels_BS in zip(
                torch.split(tokens_NS, size), torch.split(labels_NS, size), strict=True
            )
        ]

    def _learning_rate(self, index: int) -> float:
        optimizer, training = self.recipe.optimizer, self.recipe.training
        return learning_rate(
            index,
            peak=optimizer.lr,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=optimizer.decay_steps,
            decay_shape=optimizer.decay_shape,
            min_ratio=optimizer.min_lr_ratio,
            total_steps=training.steps,
        )

    def _update(self, grads: Mapping[str, Tensor], grad_norm: float, lr: float) -> None:
        clip = self.recipe.training.clip
        coefficient = clip_coefficient(grad_norm, clip) if clip else 1.0
        if coefficient != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), coefficient)
        set_learning_rate(self.model.optimizer, lr)
        self.model.optimizer.step()

    def _totals(self, loss: float, squares: float, meter: RoutingMeter) -> "_Totals":
        """Sum what each rank knows over all ranks, in one collective."""
        arch, world = self.model.architecture, self.world
        load_LE = torch.zeros(arch.num_layers, max(1, arch.num_experts), dtype=torch.float64)
        for layer, load_E in meter.loads.items():
            load_LE[layer] = load_E.to("cpu", torch.float64)
        balance = sum(float(value) for value in meter.balance.values())
        by_rank = torch.zeros(world.size, 2, dtype=torch.float64)
        finite = math.isfinite(loss) and math.isfinite(squares)
        by_rank[world.rank, 0] = 0.0 if finite else 1.0
        by_rank[world.rank, 1] = peak_memory_bytes(world.device)
        head = torch.tensor([loss, squares, balance, meter.num_records], dtype=torch.float64)
        summed = world.sum(torch.cat([head, by_rank.flatten(), load_LE.flatten()]))
        num_records = int(summed[3])
        by_rank = summed[4 : 4 + by_rank.numel()].view_as(by_rank)
        loads = summed[4 + by_rank.numel() :].view(load_LE.shape).to(torch.int64)
        return _Totals(
            loss=float(summed[0]),
            squares=float(summed[1]),
            balance=float(summed[2]) / num_records if num_records else None,
            faulty_ranks=tuple(by_rank[:, 0].nonzero().flatten().tolist()),
            memory_bytes=int(by_rank[:, 1].max()),
            load_LE=tuple(tuple(row) for row in loads.tolist()),
        )


@dataclass(frozen=True, slots=True)
class _Totals:
    loss: float
    squares: float
    balance: float | None
    faulty_ranks: tuple[int, ...]
    memory_bytes: int
    load_LE: tuple[tuple[int, ...], ...]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _sum_losses(losses: Mapping[int, Tensor]) -> float:
    """The sum over micro-batches in their order, in float64."""
    if not losses:
        return 0.0
    stacked = torch.stack([losses[micro] for micro in sorted(losses)])
    return float(stacked.double().sum())


def sum_of_squares(grads: Sequence[Tensor]) -> float:
    """The squared L2 norm of `grads` together, right to float32 rounding at any size.

    torch's CPU norm adds one element after another in float32, and is 1 % short at 1e8 of them:
    there the sum is taken over pieces.
    """
    pieces = [
        piece
        for grad in grads
        for piece in (
            torch.split(grad.flatten(), NORM_PIECE) if grad.device.type == "cpu" else (grad,)
        )
    ]
    if not pieces:
        return 0.0
    return float(torch.stack(torch._foreach_norm(pieces)).double().square().sum())
