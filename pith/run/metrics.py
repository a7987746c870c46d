"""metrics.jsonl: one JSON object a step, and between them the events, which carry `event`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pith.disk import replacing
from pith.errors import RequestError, RunFailedError
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
    samples: int | None = None  # sequences of the sample order read so far, over all steps
    sample_digest: str | None = None  # of this step's sample ids, in the order of the global batch
    expert_load: Mapping[str, Sequence[int]] = field(default_factory=dict)  # layer: count an expert


class MetricsLog:
    """Appends to metrics.jsonl, each line whole and unbuffered; NaN and infinity become null.

    What is there already ends with a whole line: see `rewind`. Raises RunFailedError where the
    file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def step(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._append(asdict(metrics))

    def event(self, event: str, **fields: object) -> None:
        """Append something that happened: `event` names it, `fields` say the rest."""
        self._append({"event": event, **fields})

    def sync(self) -> None:
        """Let what was written survive the machine, as the checkpoint that follows it does."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from error

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
            raise _unwritable(self._path, error) from error


def rewind(path: Path, *, step: int) -> int:
    """Drop what metrics.jsonl tells of steps later than `step`, and a last line that is torn.

    Lines without a step stay. Gives how many steps were dropped; 0 where there is no file. A file
    in which nothing changes is not written. Raises RequestError for any other broken line, which
    changes nothing, and RunFailedError where the file cannot be read or written.
    """
    assert step >= 0, step
    if not path.exists():
        return 0
    try:
        dropped, num_steps, is_whole = set(), 0, True
        for number, (line, value) in enumerate(_lines(path)):
            is_whole = line.endswith(b"\n")
            if value is None or (value.get("step") or 0) > step:
                dropped.add(number)
                num_steps += value is not None and _is_step(value)
        if dropped or not is_whole:
            _drop(path, dropped)
    except OSError as error:
        raise _unwritable(path, error) from error
    return num_steps


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl as they were written; none where there is no file.

    A torn last line is left out. Raises RequestError for any other broken line.
    """
    if not path.exists():
        return []
    return [value for _, value in _lines(path) if value is not None and _is_step(value)]


def read_events(path: Path, event: str) -> list[dict[str, Any]]:
    """The events of this name in metrics.jsonl, read as by `read_steps`."""
    if not path.exists():
        return []
    return [value for _, value in _lines(path) if value is not None and value.get("event") == event]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line and what it says: None for a last one that was torn when its process was killed."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            value = _parsed(line)
            if value is None and line.endswith(b"\n"):
                raise RequestError(
                    "run.metrics",
                    what="a line of the metrics is broken",
                    found=repr(line[:80].decode(errors="replace").rstrip("\n")),
                    wanted="a JSON object whose step is a whole number",
                    where=f"{path}:{number}",
                    next_step="mend or remove that line, or take --resume never",
                )
            yield line, value


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_sound = isinstance(value, dict) and isinstance(value.get("step"), int | None)
    return value if is_sound else None


def _is_step(value: Mapping[str, object]) -> bool:
    return "event" not in value and value.get("step") is not None


def _drop(path: Path, numbers: set[int]) -> None:
    """Write the file anew without the lines of these numbers, from 0; the last one gets an end."""
    with path.open("rb") as file, replacing(path) as draft:
        for number, line in enumerate(file):
            if number not in numbers:
                draft.write(line if line.endswith(b"\n") else line + b"\n")


def _unwritable(path: Path, error: OSError) -> RunFailedError:
    return RunFailedError(
        "run.metrics",
        what="the metrics cannot be written",
        found=error.strerror or str(error),
        where=str(path),
        next_step="make room or name another place with --run-dir",
    )
