"""What a run tells while it trains: metrics.jsonl, and a line a step for people."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pith.checkpoint.manifest import Position
from pith.comm.world import World
from pith.config import Recipe
from pith.data.shards import Ids
from pith.plan.flops import mfu, peak_bf16_flops
from pith.run.console import StepConsole
from pith.run.metrics import MetricsLog, StepMetrics
from pith.train.step import StepResult


class Log:
    """Everything that a run tells; only rank 0 speaks. `speeds` are tokens per second by step."""

    def __init__(self, path: Path, recipe: Recipe, world: World) -> None:
        self._recipe = recipe
        self._world = world
        self._metrics = MetricsLog(path) if world.rank == 0 else None
        self._console = StepConsole(recipe.training.steps)
        self.speeds: list[float] = []
        length = recipe.training.sequence_length
        architecture = recipe.architecture
        self._flops = {
            "mfu_causal": architecture.flops_per_token(length, causal=True),
            "mfu_full": architecture.flops_per_token(length, causal=False),
        }

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def step(
        self,
        position: Position,
        result: StepResult,
        *,
        seconds: float,
        sample_ids: Callable[[], Ids],
    ) -> None:
        """Write down the step that led to `position`; `sample_ids` gives what all ranks read."""
        tokens = self._recipe.batch(self._world.size).tokens_per_step
        self.speeds.append(tokens / seconds)
        if self._metrics is None:
            return
        metrics = StepMetrics(
            step=position.step,
            loss=result.loss,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            memory_bytes=result.memory_bytes,
            communication_seconds=self._communication(result),
            samples=position.samples,
            sample_digest=hashlib.sha256(sample_ids().tobytes()).hexdigest()[:16],
            expert_load={str(layer): row for layer, row in enumerate(result.load_LE) if any(row)},
            **self._utilisation(tokens / seconds),
        )
        self._metrics.step(metrics)
        index, log = position.step - 1, self._recipe.log
        if index % log.every == 0 or position.step == self._recipe.training.steps:
            self._console.step(metrics)

    def event(self, name: str, text: str, **fields: object) -> None:
        """Write down something that happened between steps."""
        if self._metrics is not None:
            self._metrics.event(name, **fields)
            self._console.say(text)

    def sync(self) -> None:
        """Let what was written survive the machine."""
        if self._metrics is not None:
            self._metrics.sync()

    def _communication(self, result: StepResult) -> Mapping[str, float] | None:
        """What the host measured, which says nothing of collectives that run on the device."""
        return None if self._world.backend == "nccl" else result.communication_seconds

    def _utilisation(self, tokens_per_second: float) -> dict[str, float | None]:
        device = self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {
            key: mfu(
                tokens_per_second,
                flops_per_token=flops,
                peak_flops=peak_bf16_flops(name),
                num_devices=self._world.size,
            )
            for key, flops in self._flops.items()
        }
