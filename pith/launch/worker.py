"""What one rank does: join the process group, train, leave; and how it leaves when it fails.

A rank listens for signals that ask it to save and stop until its process ends: what launched it
sends SIGTERM to those that outlive the first one, and they still have to say how they ended.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pith.errors import PithError, RunFailedError, StoppedError
from pith.launch import failures
from pith.run.job import Job
from pith.run.progress import Progress
from pith.run.stop import StopRequest

Summary = dict[str, Any]
Train = Callable[[Job, StopRequest], Summary | None]

# Where a rank is that has nothing left to do.
END = "end"
# A rank that was left alone in a collective lets the culprit speak first.
VICTIM_WAIT_S = 1.0


def entry(train: Train, job: Job) -> Summary | None:
    """The main function of a worker that pith started itself. A failure never returns."""
    # A forked child inherits handlers, which a blocked collective never runs.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    stop = StopRequest()
    stop.listen()  # before the progress file tells the launcher so
    os.dup2(2, 1)  # stdout belongs to the report of the parent
    if job.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads(int(os.environ["LOCAL_WORLD_SIZE"])))
    else:
        # torch mends a pool of threads that was forked when it is first set. Autograd would do so
        # from several threads at once, which ends in an abort.
        torch.set_num_threads(torch.get_num_threads())
    rank = int(os.environ["RANK"])
    try:
        failures.reserve(job.failures_dir, rank=rank)
        Progress(job.progress_path(rank)).set(0, "start")
        await_peers(job, stop, num_ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
        _join_group(job)
        summary = _train(train, job, stop)
        Progress(job.progress_path(rank)).set(0, END)
        return summary
    except BaseException as error:
        failure = failures.describe(error, rank=rank, job=job)
        try:
            failures.write(failure, folder=job.failures_dir)
        except OSError as unwritten:
            text = f"{failure.trace}\nrank {rank} cannot leave word of this: {unwritten}"
            print(text, file=sys.stderr)
        if failure.communication:
            time.sleep(VICTIM_WAIT_S)
        _leave(failures.LEFT_STATUS)


def _leave(status: int) -> NoReturn:
    """End this process, waiting neither for collectives nor for peers: the launcher ends them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def await_peers(job: Job, stop: StopRequest, *, num_ranks: int) -> None:
    """Wait until every rank has been started. Raises StoppedError when asked to stop before that,
    as the launcher asks when another rank cannot be started.

    A fork copies the locks that other threads of the parent hold, and its store takes that of the
    resolver for every rank that connects: a rank forked just then never finds its host.
    """
    while not all(job.progress_path(rank).exists() for rank in range(num_ranks)):
        if stop.signal is not None:
            what = f"stopped by {stop.signal.name} before the first step"
            raise StoppedError("run.stopped", what=what, next_step="run again")
        time.sleep(0.01)


def join(train: Train, job: Job, *, begin: Callable[[Job], Job | None]) -> Summary | None:
    """The main function of a process that is already a rank of an outer job.

    Rank 0 lets `begin` place the job and tells the others; None: nothing is left to do. Raises a
    PithError of this rank as it is, and RankFailedError for any other exception. When a signal
    stopped all ranks, only rank 0 raises: the others end here with the same status, and it speaks
    for them.
    """
    rank = int(os.environ["RANK"])
    stop = StopRequest()
    stop.listen()
    try:
        _meet(job)
        placed = [begin(job) if rank == 0 else None]
        dist.broadcast_object_list(placed, src=0)
        if placed[0] is None:
            dist.destroy_process_group()
            return None
        job = placed[0]
        return _train(train, job, stop)
    except StoppedError as error:
        if rank == 0:
            raise
        _leave(error.exit_status)
    except Exception as error:
        failure = failures.describe(error, rank=rank, job=job)
        if failure.communication:
            time.sleep(VICTIM_WAIT_S)
        if isinstance(error, PithError):
            raise
        raise failures.raised(job, failure) from error


def _meet(job: Job) -> None:
    """Join the group of an outer job. Raises RunFailedError where the other ranks do not come."""
    try:
        _join_group(job)
    except dist.DistError as error:
        came = re.search(r"(\d+)/(\d+) clients joined", str(error))
        raise RunFailedError(
            "launch.peers",
            what="the ranks of the outer job did not meet",
            found=f"{came[1]} of {came[2]} came" if came else str(error).splitlines()[0],
            wanted=f"{os.environ['WORLD_SIZE']} within {job.timeout_s:g} s",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            next_step="see that every rank was started and reaches that address",
        ) from error


def _train(train: Train, job: Job, stop: StopRequest) -> Summary | None:
    summary = train(job, stop)
    dist.destroy_process_group()
    return summary


def _join_group(job: Job) -> None:
    """Join the process group that RANK, WORLD_SIZE and MASTER_ADDR describe.

    Every group carries host tensors over gloo; CUDA tensors over NCCL, or over gloo where several
    ranks share one GPU.
    """
    timeout = timedelta(seconds=job.timeout_s)
    joint = _joint(timeout)
    if job.device == "cpu":
        dist.init_process_group("gloo", timeout=timeout, **joint)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if job.backend == "nccl":
        # The warning asks for groups of their own for pipeline messages, which they have.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **joint)
    else:
        dist.init_process_group("cpu:gloo,cuda:gloo", timeout=timeout, **joint)


def _joint(timeout: timedelta) -> dict[str, Any]:
    """The store that the ranks of this attempt meet in, and who this process is in it.

    torchrun serves ranks that it restarts the store of those that died, which still holds the
    addresses of these: each attempt has names of its own there.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    named = PrefixStore(f"attempt-{attempt}", store)
    return {"store": named, "rank": rank, "world_size": world_size}


def threads(num_ranks: int) -> int:
    """Threads for each of `num_ranks` ranks on this machine: its share of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
