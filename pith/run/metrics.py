"""metrics.jsonl: one JSON object a step, and between them the events, which carry `event`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pith.errors import RunFailedError
from pith.report import finite


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimizer step measured. The names are the keys of metrics.jsonl."""

    step: int  # from 1
    loss: float  # token mean over the global batch
    balance_loss: float | None  # without its coefficient: 1.0 is perfect balance
    grad_norm: float
    lr: float
    tokens: int  # of the global batch
    step_seconds: float
    tokens_per_second: float
    mfu_causal: float | None = None  # a share of 1; None where no peak is known
    mfu_full: float | None = None
    memory_bytes: int | None = None  # the peak of the worst rank
    z_loss: float | None = None  # without its coefficient
    # by phase, what a rank's host waits for others, mean over ranks; None over NCCL
    communication_seconds: Mapping[str, float] | None = None
    expert_load: Mapping[str, Sequence[int]] = field(default_factory=dict)  # layer: count an expert


class MetricsLog:
    """Appends to metrics.jsonl, each line whole and unbuffered; NaN and infinity become null.

    Raises RunFailedError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def step(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._append(asdict(metrics))

    def event(self, event: str, **fields: object) -> None:
        """Append something that happened: `event` names it, `fields` say the rest."""
        self._append({"event": event, **fields})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, value: Mapping[str, object]) -> None:
        line = (json.dumps(finite(value), allow_nan=False) + "\n").encode()
        try:
            while line:  # a disk that fills up takes a part, then refuses the rest
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            "run.metrics",
            what="the metrics cannot be written",
            found=error.strerror or str(error),
            where=str(self._path),
            next_step="make room or name another place with --run-dir",
        )
