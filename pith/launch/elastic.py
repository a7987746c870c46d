"""The workers of one job on this machine, started through torch's elastic launch."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import uuid

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in every rank
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pith.errors import RunFailedError
from pith.launch import failures
from pith.launch.worker import END, Summary, Train, entry
from pith.run.job import Job
from pith.run.progress import Position, Progress
from pith.run.stop import StopRequest

# How long a rank may take to end once another one has failed.
GRACE_S = 5.0
POLL_S = 0.05
HOST = "localhost"
ONE_NODE = "one-node"
AT_ONCE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(train: Train, job: Job, *, num_ranks: int) -> Summary:
    """Run `train(job, stop)` on `num_ranks` new processes and return what rank 0 returned.

    SIGTERM and SIGUSR1 are passed on to the ranks, which may take any time to save and stop. The
    first failure ends all of them. Raises the PithError that a rank raised, RankFailedError with
    the rank's own traceback for any other exception, RunFailedError for a rank that was killed or
    went silent, KeyboardInterrupt when interrupted.
    """
    _silence_elastic()
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    job.failures_dir.mkdir(parents=True)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    at_once = [number for number in AT_ONCE if number != signal.SIGHUP or not ignored]
    with StopRequest.listening() as gentle, StopRequest.listening(at_once) as end:
        watch = _Watch(job, num_ranks, gentle, end)
        threading.Thread(target=watch.run, daemon=True).start()
        try:
            returned = elastic_launch(_config(job, num_ranks), entry)(train, job)
        except ChildFailedError as error:
            if end.signal is None:
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                raise failures.verdict(job, exit_codes=codes, num_ranks=num_ranks) from None
        finally:
            watch.done.set()
    if end.signal is not None:
        raise _stopped(end.signal)
    shutil.rmtree(job.failures_dir, ignore_errors=True)
    summary: Summary = returned[0]
    return summary


def _silence_elastic() -> None:
    """Elastic tells of failures in its own words, often of a victim: pith names the culprit."""
    quiet = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    for name in (*quiet, *logging.root.manager.loggerDict):
        if name.startswith(quiet):  # each of its modules has set a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _OneNode(StaticTCPRendezvous):
    """The node meets itself, at a free port. The c10d backend would look through the modules of
    the process at each turn: with torch imported that is a second of work in every launch."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(HOST, 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=60)

    def get_backend(self) -> str:
        return ONE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        meeting = RendezvousStoreInfo(HOST, store.port)
        return RendezvousInfo(PrefixStore(self.run_id, store), 0, 1, meeting)


rendezvous_handler_registry.register(ONE_NODE, _OneNode)


def _config(job: Job, num_ranks: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=ONE_NODE,
        local_addr=HOST,
        max_restarts=0,
        monitor_interval=0.1,
        # Where there is a GPU, looking for it has initialised CUDA, which no fork survives, not
        # even into ranks that compute on the CPU. Without one a fork spares the import of torch.
        start_method="spawn" if torch.cuda.is_available() else "fork",
        signals_to_handle="",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


class _Watch:
    """What goes on beside elastic until the launch is done: signals are passed on, and the ranks
    killed where they would outlive the first failure by long."""

    def __init__(self, job: Job, num_ranks: int, gentle: StopRequest, end: StopRequest) -> None:
        self.done = threading.Event()
        self._job = job
        self._gentle = gentle
        self._end = end
        self._ranks = range(num_ranks)
        self._told: set[int] = set()
        self._others = set(multiprocessing.active_children())

    def run(self) -> None:
        """Watch until `done`. A rank may be started while others are killed: hence the loop."""
        while not self.done.wait(POLL_S):
            if self._end.signal is None:
                if not self._failed():
                    self._pass_on()
                    continue
                # A rank in a collective cannot hear the SIGTERM that elastic sends it.
                self.done.wait(GRACE_S)
            if not self.done.is_set():
                for process in set(multiprocessing.active_children()) - self._others:
                    process.kill()

    def _failed(self) -> bool:
        """Whether a rank has left word of its failure, or is gone before its end."""
        if any(self._job.failures_dir.glob("rank-*.json")):
            return True
        return any(p.slot != END and not _signal(p.pid, 0) for p in self._begun().values())

    def _begun(self) -> dict[int, Position]:
        """How far each rank is that has begun."""
        found = {rank: Progress.read(self._job.progress_path(rank)) for rank in self._ranks}
        return {rank: position for rank, position in found.items() if position is not None}

    def _pass_on(self) -> None:
        """Tell each rank once that it is to stop, as soon as it listens: when it has begun."""
        if self._gentle.signal is None:
            return
        for rank, position in self._begun().items():
            if rank not in self._told:
                _signal(position.pid, self._gentle.signal)
                self._told.add(rank)


def _signal(process_id: int, number: int) -> bool:
    """Send a signal, 0 for none, to a process; whether there is one, if only to be reaped."""
    try:
        os.kill(process_id, number)
    except ProcessLookupError:
        return False
    return True


def _stopped(number: signal.Signals) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return RunFailedError("run.stopped", what=f"stopped by {number.name}", next_step="run again")
