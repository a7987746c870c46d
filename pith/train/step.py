"""One optimizer step: forward and backward through the table, reduce, clip, update."""

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pith.comm.groups import summing
from pith.comm.world import World
from pith.config import Recipe
from pith.data.loader import Batch
from pith.engine.chunk import MicroBatch
from pith.engine.clock import Clock
from pith.engine.executor import Watch
from pith.layer.balance import StepLoad
from pith.layer.protocol import Context, RouterLosses
from pith.plan.mesh import DATA_AXES
from pith.schedule.simulate import Span
from pith.train.build import Model
from pith.train.learning_rate import learning_rate
from pith.train.optim import clip_coefficient, set_learning_rate
from pith.train.routing import StepRouting

NORM_PIECE = 1 << 16  # elements


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on every rank."""

    loss: float  # mean over the counted labels of the global batch
    balance_loss: float | None  # mean over routed layers and micro-batches, without coefficient
    z_loss: float | None  # the same of the squared log-sum of router logits
    grad_norm: float  # of the whole model, before clipping
    lr: float
    num_counted: int  # labels that count
    updated: bool  # False: something was not finite and no rank moved
    stop: bool  # whether any rank was asked to stop
    faulty_ranks: tuple[int, ...]
    load_LE: tuple[tuple[int, ...], ...]  # (token, slot) pairs per layer and expert
    memory_bytes: int  # the peak so far of the rank that needs most
    communication_seconds: Mapping[str, float]  # by phase, the host's, mean over ranks
    slots: tuple[str, ...]  # what this rank executed
    spans: tuple[Span, ...]  # and when, in seconds on the clock of the step; empty without one


# Phases of communication in the order in which their times are summed over ranks.
PHASES = (
    "start",
    "gather",
    "pipeline",
    "route",
    "dispatch",
    "combine",
    "combine-backward",
    "dispatch-backward",
    "balance",
    "reduce",
)


@dataclass(slots=True)
class RoutingMeter:
    """Counts of one step, by layer."""

    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)  # sums of [balance, z]
    num_records: int = 0

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        self.num_records += 1
        losses = torch.stack([balance_loss.detach(), z_loss.detach()])
        if layer in self.loads:
            self.loads[layer] = self.loads[layer] + load_E
            self.losses[layer] = self.losses[layer] + losses
        else:
            self.loads[layer], self.losses[layer] = load_E, losses


class Trainer:
    """Takes steps. Holds no data order: the caller says which batch is next.

    `routing` replaces what routers choose in training steps, for benchmarks and comparisons.
    """

    def __init__(
        self, recipe: Recipe, world: World, model: Model, *, routing: StepRouting | None = None
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.model = model
        self.routing = routing

    @property
    def rows(self) -> slice:
        """Which sequences of the global batch this rank reads."""
        batch = self.recipe.batch(self.world.size)
        size = batch.global_batch_size // batch.data_ranks
        start = self.model.mesh.data_rank(self.world.rank) * size
        return slice(start, start + size)

    def step(
        self,
        index: int,
        batch: Batch,
        *,
        watch: Watch = lambda text: None,
        is_stop_wanted: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> StepResult:
        """Train as step `index`, counted from 0, on this rank's `rows` of a global batch.

        `watch` is called with the text of each slot, and with "gather", "reduce" and "optimizer",
        before it starts. `is_stop_wanted` is asked once, late in the step, and the ranks agree.
        `clock`, a new one, times the slots; every rank has one in the same steps.
        """
        model, meter, clock = self.model, RoutingMeter(), clock or Clock()
        model.stopwatch.lap()  # an evaluation may have gone before
        num_counted, num_labels = self._count(batch)
        clock.zero()
        watch("gather")
        self._gather()
        losses = self._router_losses(counted_share=num_counted / num_labels)
        micro_batches = self._micro_batches(batch, losses=losses, meter=meter, routing=self.routing)
        execution = model.training.run(micro_batches, watch=watch, clock=clock)
        watch("reduce")
        with model.stopwatch.running("reduce"):
            grads = model.parameters.reduce(scale=1.0 / max(1, num_counted))
        squares = sum_of_squares([grads[name] for name in sorted(model.parameters.counted)])
        loss = _sum_losses(execution.losses)
        totals = self._totals(loss, squares, meter, is_stop_wanted=is_stop_wanted())
        grad_norm = math.sqrt(totals.squares) if totals.squares >= 0 else math.nan
        is_finite = math.isfinite(totals.loss) and math.isfinite(totals.squares)
        faulty_ranks = () if is_finite else self._faulty_ranks(loss)
        lr = self._learning_rate(index)
        watch("optimizer")
        if is_finite:
            self._update(grads, grad_norm, lr)
        model.parameters.release()
        return StepResult(
            loss=totals.loss / max(1, num_counted),
            balance_loss=totals.balance,
            z_loss=totals.z,
            grad_norm=grad_norm,
            lr=lr,
            num_counted=num_counted,
            updated=is_finite,
            stop=totals.stop,
            faulty_ranks=faulty_ranks,
            load_LE=totals.load_LE,
            memory_bytes=totals.memory_bytes,
            communication_seconds=totals.communication_seconds,
            slots=tuple(execution.slots),
            spans=clock.spans(),
        )

    def evaluate(self, batch: Batch) -> float:
        """The **sum** of the token losses of a global batch, of which `batch` holds this rank's
        `rows`; weights untouched, equal on every rank."""
        self._gather()
        micro_batches = self._micro_batches(
            batch, losses=RouterLosses(), meter=RoutingMeter(), routing=None
        )
        losses = self.model.evaluation.run(micro_batches).losses
        self.model.parameters.release()
        total = self.world.sum(torch.tensor([_sum_losses(losses)], dtype=torch.float64))
        return float(total[0])

    def _count(self, batch: Batch) -> tuple[int, int]:
        """Labels that count, and all labels, of the global batch."""
        pp, _, cp, _ = self.model.mesh.coordinates(self.world.rank)
        reads_for_all = pp == cp == 0  # its pipeline and context peers read the same
        mine = [batch.num_counted, batch.labels_NS.size] if reads_for_all else [0, 0]
        with self.model.stopwatch.running("start"):
            num_counted, num_labels = self.world.sum(torch.tensor(mine)).tolist()
        return num_counted, num_labels

    def _gather(self) -> None:
        with self.model.stopwatch.running("gather"):
            self.model.parameters.gather()

    def _router_losses(self, *, counted_share: float) -> RouterLosses:
        recipe = self.recipe
        weight = counted_share * recipe.batch(self.world.size).tokens_per_micro_batch
        scope = recipe.balance.scope
        return RouterLosses(
            scope="sequence" if scope == "none" else scope,
            balance_scale=recipe.balance_coefficient * weight,
            z_scale=recipe.balance.z_loss * weight,
            load=self._step_load() if scope == "global-batch" else None,
        )

    def _step_load(self) -> StepLoad:
        model = self.model
        sum_over_data_ranks = summing(model.groups.along(*DATA_AXES))

        def timed(counts_E: Tensor) -> Tensor:
            with model.stopwatch.running("balance"):
                return sum_over_data_ranks(counts_E)

        return StepLoad(timed)

    def _micro_batches(
        self,
        batch: Batch,
        *,
        losses: RouterLosses,
        meter: RoutingMeter,
        routing: StepRouting | None,
    ) -> list[MicroBatch]:
        """Cut this rank's sequences into micro-batches."""
        size, device = self.recipe.training.micro_batch_size, self.world.device
        tokens_NS = torch.from_numpy(batch.tokens_NS).to(device)
        labels_NS = torch.from_numpy(batch.labels_NS).to(device)
        stage = next(iter(self.model.stages.values()))
        angles = stage.rotary(torch.arange(tokens_NS.shape[1], device=device)[None])
        first_row, micro_batches = self.rows.start, []
        for start in range(0, len(tokens_NS), size):
            rows = slice(first_row + start, first_row + start + size)
            choices = routing.at(rows) if routing is not None else None
            context = Context(*angles, meter, losses, choices)
            here = slice(start, start + size)
            micro_batches.append(MicroBatch(tokens_NS[here], labels_NS[here], context))
        return micro_batches

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

    def _faulty_ranks(self, loss: float) -> tuple[int, ...]:
        """The ranks whose own loss or gradients, before any sum over ranks, are not finite.

        All of them where only a sum overflowed.
        """
        world = self.world
        is_sound = math.isfinite(loss) and self.model.parameters.are_gradients_finite()
        faulty = torch.zeros(world.size, dtype=torch.int64)
        faulty[world.rank] = 0 if is_sound else 1
        found = world.sum(faulty).nonzero().flatten().tolist()
        return tuple(found or range(world.size))

    def _totals(
        self, loss: float, squares: float, meter: RoutingMeter, *, is_stop_wanted: bool
    ) -> "_Totals":
        """Sum what each rank knows over all ranks, in one collective."""
        arch, world = self.model.architecture, self.world
        load_LE = torch.zeros(arch.num_layers, max(1, arch.num_choices), dtype=torch.float64)
        for layer, load_E in meter.loads.items():
            load_LE[layer] = load_E.to("cpu", torch.float64)
        nothing = torch.zeros(2, dtype=torch.float64, device=world.device)
        balance, z = sum(meter.losses.values(), nothing).tolist()  # one wait for the device
        memory = torch.zeros(world.size, dtype=torch.float64)
        memory[world.rank] = peak_memory_bytes(world.device)
        seconds = self.model.stopwatch.lap()
        spent = [seconds.get(phase, 0.0) for phase in PHASES]
        mine = torch.tensor(
            [loss, squares, balance, z, meter.num_records, is_stop_wanted, *spent],
            dtype=torch.float64,
        )
        summed = world.sum(torch.cat([mine, memory, load_LE.flatten()]))
        sums, memory, loads = torch.split(summed, [len(mine), len(memory), load_LE.numel()])
        num_records = int(sums[4])
        means = [total / num_records for total in sums[2:4].tolist()] if num_records else [None] * 2
        return _Totals(
            loss=float(sums[0]),
            squares=float(sums[1]),
            balance=means[0],
            z=means[1],
            stop=bool(sums[5]),
            memory_bytes=int(memory.max()),
            communication_seconds={
                phase: total / world.size
                for phase, total in zip(PHASES, sums[6:].tolist(), strict=True)
            },
            load_LE=tuple(tuple(row) for row in loads.view(load_LE.shape).long().tolist()),
        )


@dataclass(frozen=True, slots=True)
class _Totals:
    loss: float
    squares: float
    balance: float | None
    z: float | None
    stop: bool
    memory_bytes: int
    communication_seconds: dict[str, float]
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
