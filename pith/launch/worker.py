"""What one rank does: join the process group, train, leave; and how it leaves when it fails."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pith.errors import PithError
from pith.launch import failures
from pith.run.job import Job
from pith.run.progress import Progress

Summary = dict[str, Any]
Train = Callable[[Job], Summary | None]

# A rank that was left alone in a collective lets the culprit speak first.
VICTIM_WAIT_S = 1.0


def entry(train: Train, job: Job) -> Summary | None:
    """The main function of a worker that pith started itself. A failure never returns."""
    # A forked child inherits handlers that raise in Python, which a blocked collective never runs.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout belongs to the report of the parent
    if job.device == "cpu":
        torch.set_num_threads(threads(int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        return work(train, job)
    except BaseException as error:
        _leave_word(error, job)
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither the collectives nor the peers are waited for: the launcher ends them.
        os._exit(1)


def join(train: Train, job: Job) -> Summary | None:
    """The main function of a process that is a rank of an outer job already.

    Raises a PithError of this rank as it is, and RankFailedError for any other exception.
    """
    try:
        return work(train, job)
    except PithError as error:
        _leave_word(error, job)
        raise
    except Exception as error:
        failure = _leave_word(error, job)
        raise failures.raised(job, failure) from error


def work(train: Train, job: Job) -> Summary | None:
    """Join the process group of the environment's RANK and WORLD_SIZE, and train in it."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    Progress(job.progress_path(rank)).set(0, "start")
    timeout = timedelta(seconds=job.timeout_s)
    if job.device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if job.backend == "nccl":
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("cpu:gloo,cuda:gloo", timeout=timeout)
    summary = train(job)
    dist.destroy_process_group()
    return summary


def threads(num_ranks: int) -> int:
    """Threads for each of `num_ranks` ranks on this machine: its share of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _leave_word(error: BaseException, job: Job) -> failures.Failure:
    failure = failures.describe(error, rank=int(os.environ["RANK"]))
    failures.write(failure, folder=job.failures_dir)
    if failure.communication:
        time.sleep(VICTIM_WAIT_S)
    return failure
