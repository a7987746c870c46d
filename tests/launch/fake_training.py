"""Stand-ins for the training loop: ranks that fail in known ways while the others wait for them,
and ranks that take steps until a signal, which they send themselves, asks them to save and stop."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pith.errors import RunFailedError, StoppedError
from pith.run.job import Job
from pith.run.progress import Progress
from pith.run.stop import StopRequest

NUM_STEPS = 60
STEP_S = 0.05
ASKED_STEP = 3
SLOW_S = 6.0  # a save that takes longer than a rank may outlive a failure


def sums_ranks(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    print("words on stdout")
    return {"sum": int(total), "name": job.recipe_name} if dist.get_rank() == 0 else None


def raises_in_rank_1(job: Job, stop: StopRequest) -> None:
    _fail_on(job, rank=1, fail=_raise_value_error)


def raises_late_in_rank_1(job: Job, stop: StopRequest) -> None:
    """Rank 1 fails long after the others entered the collective."""
    _fail_on(job, rank=1, fail=_raise_value_error, after_s=2.0)


def killed_in_rank_2(job: Job, stop: StopRequest) -> None:
    _fail_on(job, rank=2, fail=_kill)


def stopped_in_rank_2(job: Job, stop: StopRequest) -> None:
    _fail_on(job, rank=2, fail=_stop)


def non_finite_in_rank_0(job: Job, stop: StopRequest) -> None:
    _fail_on(job, rank=0, fail=_raise_non_finite)


def leaves_with_a_status_in_rank_1(job: Job, stop: StopRequest) -> None:
    _fail_on(job, rank=1, fail=_leave)


def killed_in_rank_2_while_others_sleep(job: Job, stop: StopRequest) -> None:
    """Rank 2 is killed where the others do not notice it."""
    Progress(job.progress_path(dist.get_rank())).set(7, "F0.3")
    if dist.get_rank() == 2:
        _kill()
    time.sleep(60)


def asked_through_the_launcher(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    def again() -> None:
        os.kill(os.getppid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)

    ask = _to_launcher(signal.SIGTERM, signal.SIGTERM)
    return _steps(job, stop, ask=ask, saving_s=SLOW_S, while_saving=again)


def asked_in_rank_1(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    def ask() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    return _steps(job, stop, ask=ask)


def asked_in_all_ranks(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    return _steps(job, stop, ask=lambda: os.kill(os.getpid(), signal.SIGTERM))


def asked_too_late(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    summary = _steps(job, stop, num_steps=3)
    _to_launcher(signal.SIGTERM)()
    time.sleep(0.5)
    return summary


def asked_and_killed_in_rank_2(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    def die() -> None:
        if dist.get_rank() == 2:
            _kill()

    ask = _to_launcher(signal.SIGTERM)
    return _steps(job, stop, ask=ask, saving_s=0.5, while_saving=die)


def asked_and_interrupted(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    interrupt = _to_launcher(signal.SIGINT)
    return _steps(job, stop, ask=_to_launcher(signal.SIGUSR1), saving_s=60, while_saving=interrupt)


def asked_without_space_for_a_word(job: Job, stop: StopRequest) -> dict[str, Any] | None:
    """Rank 1, the first to end, leaves none: it could not write it."""

    def leave() -> None:
        if dist.get_rank() == 1:
            os._exit(1)
        time.sleep(0.5)

    return _steps(job, stop, ask=_to_launcher(signal.SIGTERM), once_saved=leave)


def _steps(
    job: Job,
    stop: StopRequest,
    *,
    num_steps: int = NUM_STEPS,
    ask: Callable[[], None] = lambda: None,
    saving_s: float = 0.2,
    while_saving: Callable[[], None] = lambda: None,
    once_saved: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Steps that each end with an agreement on whether to stop; every rank calls `ask` in one."""
    progress = Progress(job.progress_path(dist.get_rank()))
    for step in range(1, num_steps + 1):
        progress.set(step, "F0.3")
        if step == ASKED_STEP:
            ask()
        time.sleep(STEP_S)
        asked = torch.tensor([stop.signal or 0])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked:
            progress.set(step, "save")
            while_saving()
            time.sleep(saving_s)
            dist.barrier()
            once_saved()
            name = signal.Signals(int(asked)).name
            what = f"stopped by {name} at step {step}"
            raise StoppedError("run.stopped", what=what, next_step="run again")
    return {"steps": step} if dist.get_rank() == 0 else None


def _to_launcher(*numbers: int) -> Callable[[], None]:
    """What sends them from rank 0 to the process that started it."""

    def send() -> None:
        for number in numbers if dist.get_rank() == 0 else ():
            os.kill(os.getppid(), number)

    return send


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
