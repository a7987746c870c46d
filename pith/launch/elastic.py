"""The workers of one job on this machine, started through torch's elastic launch."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in every rank
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pith.errors import RunFailedError
from pith.launch import failures
from pith.launch.worker import Summary, Train, entry
from pith.run.job import Job

# How long a rank may take to end once another one has failed.
GRACE_S = 5.0
POLL_S = 0.2
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(train: Train, job: Job, *, num_ranks: int) -> Summary:
    """Run `train(job)` on `num_ranks` new processes and return what rank 0 returned.

    The first failure ends all of them. Raises the PithError that a rank raised, RankFailedError
    with the rank's own traceback for any other exception, RunFailedError for a rank that was
    killed or went silent, KeyboardInterrupt when interrupted.
    """
    _silence_elastic()
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    job.failures_dir.mkdir(parents=True)
    done = threading.Event()
    with _signals_noted() as stopped_by:
        threading.Thread(target=_end_ranks, args=(job, done, stopped_by), daemon=True).start()
        try:
            returned = elastic_launch(_config(job, num_ranks), entry)(train, job)
        except ChildFailedError as error:
            if not stopped_by:
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                raise failures.verdict(job, exit_codes=codes, num_ranks=num_ranks) from None
        finally:
            done.set()
    if stopped_by:
        raise _stopped(stopped_by[0])
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    summary: Summary = returned[0]
    return summary


def _silence_elastic() -> None:
    """Elastic tells of failures in its own words, often of a victim: pith names the culprit."""
    quiet = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    for name in (*quiet, *logging.root.manager.loggerDict):
        if name.startswith(quiet):  # each of its modules has set a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _config(job: Job, num_ranks: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        # Where there is a GPU, looking for it has initialised CUDA, which no fork survives, not
        # even into ranks that compute on the CPU. Without one a fork spares the import of torch.
        start_method="spawn" if torch.cuda.is_available() else "fork",
        signals_to_handle="",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


@contextmanager
def _signals_noted() -> Iterator[list[signal.Signals]]:
    """Note what asks the launch to stop, and raise nothing.

    A handler that raises, as elastic's own does, is lost where it runs inside a hook of fork.
    """
    noted: list[signal.Signals] = []
    handlers = {
        number: signal.signal(number, lambda caught, _: noted.append(signal.Signals(caught)))
        for number in STOPPING
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP  # nohup
    }
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_ranks(job: Job, done: threading.Event, stopped_by: list[signal.Signals]) -> None:
    """Kill the ranks when the launch is to stop, or when they outlive the first failure by long.

    A stopped rank ignores SIGTERM. A rank may be started while others are killed: hence the loop.
    """
    while not done.wait(POLL_S):
        if not stopped_by and any(job.failures_dir.glob("rank-*.json")):
            done.wait(GRACE_S)
        elif not stopped_by:
            continue
        for process in () if done.is_set() else multiprocessing.active_children():
            process.kill()


def _stopped(number: signal.Signals) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return RunFailedError("run.stopped", what=f"stopped by {number.name}", next_step="run again")
