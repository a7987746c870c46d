"""What a run tells the person who watches it: a line a step, on stderr."""

import statistics
from collections import deque

from rich.console import Console

from pith.run.metrics import StepMetrics

ETA_WINDOW = 20  # steps; the median of their times, so that one slow step does not shake it


class StepConsole:
    """Writes a line a step, coloured on a terminal and plain elsewhere; one process has one."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = console or Console(stderr=True)
        self._seconds: deque[float] = deque(maxlen=ETA_WINDOW)

    def step(self, metrics: StepMetrics) -> None:
        """Say how one step went and how long the rest will take."""
        self._seconds.append(metrics.step_seconds)
        left = (self._total_steps - metrics.step) * statistics.median(self._seconds)
        self.say(step_line(metrics, total_steps=self._total_steps, seconds_left=left))

    def say(self, text: str) -> None:
        """Write `text` as it is: no markup, no wrapping."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)


def step_line(metrics: StepMetrics, *, total_steps: int, seconds_left: float) -> str:
    """One step in one line. Memory in GB of 1e9 bytes."""
    parts = [
        f"step {metrics.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {metrics.loss:7.4f}",
        f"grad norm {metrics.grad_norm:8.4f}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
    ]
    if metrics.mfu_causal is not None:
        parts.append(f"mfu {100 * metrics.mfu_causal:.1f}%")
    if metrics.memory_bytes is not None:
        parts.append(f"memory {metrics.memory_bytes / 1e9:.2f} GB")
    parts.append(f"eta {duration(seconds_left)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """A time span in its two largest units: 8s, 3m05s, 2h07m, 1d03h."""
    whole = max(0, round(seconds))
    for size, unit, part, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"
