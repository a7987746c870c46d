"""Stand-ins for the training loop: ranks that fail in known ways while the others wait for them."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from pith.errors import RunFailedError
from pith.run.job import Job
from pith.run.progress import Progress


def sums_ranks(job: Job) -> dict[str, Any] | None:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    print("words on stdout")
    return {"sum": int(total), "name": job.recipe_name} if dist.get_rank() == 0 else None


def raises_in_rank_1(job: Job) -> None:
    _fail_on(job, rank=1, fail=_raise_value_error)


def raises_late_in_rank_1(job: Job) -> None:
    """Rank 1 fails long after the others entered the collective."""
    _fail_on(job, rank=1, fail=_raise_value_error, after_s=2.0)


def killed_in_rank_2(job: Job) -> None:
    _fail_on(job, rank=2, fail=_kill)


def stopped_in_rank_2(job: Job) -> None:
    _fail_on(job, rank=2, fail=_stop)


def non_finite_in_rank_0(job: Job) -> None:
    _fail_on(job, rank=0, fail=_raise_non_finite)


def leaves_with_a_status_in_rank_1(job: Job) -> None:
    _fail_on(job, rank=1, fail=_leave)


def _fail_on(job: Job, *, rank: int, fail: Any, after_s: float = 0.3) -> None:
    progress = Progress(job.progress_path(dist.get_rank()))
    progress.set(7, "F0.3")
    if dist.get_rank() == rank:
        time.sleep(after_s)
        fail()
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


def _raise_value_error() -> None:
    raise ValueError("the culprit speaks")


def _raise_non_finite() -> None:
    raise RunFailedError("run.non-finite", what="loss is nan", where="step 7", next_step="lower lr")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave() -> None:
    os._exit(9)
