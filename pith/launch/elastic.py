"""The workers of one job on this machine, started through torch's elastic launch."""

import logging
import os
import shutil
import signal
import threading
import uuid

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in every rank
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pith.errors import RunFailedError
from pith.launch import failures
from pith.launch.worker import Summary, Train, entry
from pith.run.job import Job

# How long a rank may take to end once another one has failed.
GRACE_S = 5.0


def launch(train: Train, job: Job, *, num_ranks: int) -> Summary:
    """Run `train(job)` on `num_ranks` new processes and return what rank 0 returned.

    The first failure ends all of them. Raises the PithError that a rank raised, RankFailedError
    with the rank's own traceback for any other exception, RunFailedError for a rank that was
    killed or went silent, KeyboardInterrupt when interrupted.
    """
    # Elastic tells of failures in its own words, often of a victim: pith names the culprit.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    job.failures_dir.mkdir(parents=True)
    done = threading.Event()
    threading.Thread(target=_end_stragglers, args=(job, done), daemon=True).start()
    try:
        returned = elastic_launch(_config(job, num_ranks), entry)(train, job)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise failures.verdict(job, exit_codes=codes, num_ranks=num_ranks) from None
    except SignalException as error:
        raise _stopped(error.sigval) from None
    finally:
        done.set()
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    summary: Summary = returned[0]
    return summary


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
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


def _end_stragglers(job: Job, done: threading.Event) -> None:
    """Kill what still runs some seconds after the first failure: a stopped rank ignores SIGTERM."""
    while not done.wait(0.5):
        if any(job.failures_dir.glob("rank-*.json")):
            done.wait(GRACE_S)
            for pid in () if done.is_set() else failures.remaining(job):
                os.kill(pid, signal.SIGKILL)
            return


def _stopped(number: signal.Signals) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return RunFailedError("run.stopped", what=f"stopped by {number.name}", next_step="run again")
