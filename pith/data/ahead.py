"""Work done ahead of its consumer, handed over in order: on threads, or in other processes."""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerLostError(Exception):
    """A process ended before it gave the result it was asked for."""


def in_order(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """`map` on a pool that takes at most `ahead` items more than were consumed.

    What a call raises is raised where its result is taken.
    """
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Generator[Result, None, None]:
    """`map` by new processes that take turns, each with one item at a time.

    What a call raises is raised where its result is taken; there a process that died raises
    WorkerLostError. No process outlives the iteration: close it if it is not used up.
    """
    items = iter(items)
    first = deque(islice(items, num_workers))
    with ExitStack() as running:
        busy = deque(running.enter_context(_worker(function)) for _ in first)
        for worker in busy:
            _send(worker, first.popleft())
        for item in items:
            worker = busy.popleft()
            result = _receive(worker)
            _send(worker, item)
            busy.append(worker)
            yield result
        for worker in busy:
            yield _receive(worker)


@contextmanager
def _worker(function: Callable[[Item], Result]) -> Iterator[Connection]:
    """A process that answers items with results.

    Each of the two alone holds its end of the connection, and so learns of the other's death.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            yield ours
        finally:
            process.kill()  # a stopped process would not heed terminate()
            process.join()


def _serve(connection: Connection, function: Callable[[Item], Result]) -> None:
    """Answers until the parent is gone; signals that a whole job gets are left to that."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_attempt(function, connection.recv()))


def _attempt(
    function: Callable[[Item], Result], item: Item
) -> tuple[Result, None] | tuple[None, Exception]:
    try:
        return function(item), None
    except Exception as error:
        error.add_note(traceback.format_exc())  # tracebacks do not cross processes
        return None, error


def _send(worker: Connection, item: object) -> None:
    try:
        worker.send(item)
    except OSError as error:
        raise WorkerLostError from error


def _receive(worker: Connection) -> Any:
    try:
        result, error = worker.recv()
    except (EOFError, OSError) as lost:
        raise WorkerLostError from lost
    if error is not None:
        raise error
    return result
