"""The learning rate of a step: a pure function, so that resuming needs no scheduler state.

    constant   warm-up, then the peak
    cosine     warm-up, then half a cosine down to the floor at the last step
    wsd        warm-up, the peak, then `decay_steps` steps down to the floor at the last step

The floor is `min_ratio` times the peak.
"""

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "wsd"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Schedule,
    warmup_steps: int,
    decay_steps: int,
    decay_shape: DecayShape,
    min_ratio: float,
    total_steps: int,
) -> float:
    """The rate for optimizer step `step`, counted from 0.

    Warm-up is linear: step 0 takes peak / warmup_steps, step warmup_steps - 1 the peak. Where decay
    and warm-up overlap, decay starts after the warm-up. `decay_steps` and `decay_shape` are read by
    wsd alone.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        decay_steps, decay_shape = total_steps - warmup_steps, "cosine"
    start = max(total_steps - decay_steps, warmup_steps)
    if step < start:
        return peak
    done = min(1.0, (step + 1 - start) / max(1, total_steps - start))
    return peak * (min_ratio + (1.0 - min_ratio) * _remaining(done, shape=decay_shape))


def _remaining(done: float, *, shape: DecayShape) -> float:
    """How much of the way above the floor is left, 1 to 0, when `done` of the decay is over."""
    if shape == "linear":
        return 1.0 - done
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - math.sqrt(done)
