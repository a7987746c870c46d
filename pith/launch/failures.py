"""Which rank failed first, and how: what ranks leave behind, and what the parent makes of it."""

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pith.errors import (
    Fault,
    PithError,
    RequestError,
    RunFailedError,
    StoppedError,
    UnavailableError,
)
from pith.run.job import Job
from pith.run.progress import Progress

# What gloo, NCCL and their stores say when the other side is gone or silent.
COMMUNICATION = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|broken pipe|timed out|timeout"
    r"|NCCL|TCPStore|socket",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile(
    r"out of memory|(can't|cannot) allocate memory|storage size calculation overflowed"
    r"|bad_alloc|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
# Written when a rank starts, so that its last word needs no space on a disk that is full.
RESERVED_BYTES = 32 * 1024
KINDS = (RequestError, UnavailableError, RunFailedError, StoppedError)
# With which a rank ends that has left word, or could not.
LEFT_STATUS = 1


class RankFailedError(PithError):
    """A rank raised something that is no PithError; its own traceback is the note."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed, as it saw it itself. `error` holds the fields of a PithError."""

    rank: int
    time: float
    communication: bool
    summary: str
    trace: str
    error: dict[str, Any] | None = None

    @property
    def is_stop(self) -> bool:
        """Whether the rank was asked to stop, and did so after all ranks had saved."""
        return self.error is not None and self.error["status"] == StoppedError.exit_status


def describe(error: BaseException, *, rank: int, job: Job) -> Failure:
    """The failure of `rank` as a value that survives the process.

    Out of memory, whoever says it, becomes a RunFailedError with the rank and where it was.
    """
    fields = None
    trace = "".join(traceback.format_exception(error)).rstrip()
    communication = is_communication(error) and not isinstance(error, StoppedError)
    if is_out_of_memory(error):
        communication = False
        error = RunFailedError(
            "run.out-of-memory",
            what=f"rank {rank} ran out of memory at {_position(job, rank)}",
            found=_summary(error),
            next_step="lower training.micro_batch_size or training.sequence_length",
        )
    if isinstance(error, PithError):
        faults = [asdict(fault) for fault in error.faults]
        fields = {"status": error.exit_status, "faults": faults, **error.as_dict()}
    return Failure(
        rank=rank,
        time=time.time(),
        communication=communication,
        summary=_summary(error),
        trace=trace,
        error=fields,
    )


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """True for what Python, the system, torch on the CPU and CUDA raise without memory."""
    if isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__:
        return True
    told = isinstance(error, RuntimeError | OSError)
    return told and OUT_OF_MEMORY.search(str(error)) is not None


def is_communication(error: BaseException) -> bool:
    """True for an error that another rank's end can cause: it names a victim, not a culprit."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        if "DistError" in names:
            return True
        if isinstance(chain, RuntimeError) and COMMUNICATION.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def reserve(folder: Path, *, rank: int) -> None:
    """Take the space for a failure of `rank` now: blanks, which JSON ignores after its end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.part").write_bytes(b" " * RESERVED_BYTES)


def write(failure: Failure, *, folder: Path) -> None:
    """Leave `failure` for the parent: whole, even if this process is killed while writing."""
    part = folder / f"rank-{failure.rank}.part"
    if not part.exists():
        reserve(folder, rank=failure.rank)
    with part.open("r+b") as file:
        file.write(json.dumps(asdict(failure)).encode())
    part.replace(folder / f"rank-{failure.rank}.json")


def read(folder: Path) -> list[Failure]:
    """Every failure left in `folder`, earliest first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda failure: failure.time)


def verdict(job: Job, *, exit_codes: Mapping[int, int], num_ranks: int) -> PithError:
    """The one error that tells why the job ended.

    `exit_codes` holds what the launcher saw first: rank to exit code, negative for a signal. A
    rank that ended and left no word comes first (except by SIGABRT, with which NCCL ends a
    victim), then the earliest failure of a rank's own, then that the ranks stopped when asked to,
    then a rank that went silent, and last a failure in communication.
    """
    failures = read(job.failures_dir)
    told = {failure.rank for failure in failures}
    own = [failure for failure in failures if not failure.communication]
    own.sort(key=lambda failure: failure.is_stop)
    # One that stopped as the others did may have found no space for its word.
    excused = {-signal.SIGABRT} if own else set()
    excused |= {LEFT_STATUS} if own and own[0].is_stop else set()
    for rank, code in exit_codes.items():
        if rank not in told and code not in excused:
            return _lost(job, rank=rank, code=code)
    if own:
        return raised(job, own[0])
    silent = [rank for rank in range(num_ranks) if rank not in told]
    if silent:
        return _silent(job, failures[0], silent=silent)
    return raised(job, failures[0])


def raised(job: Job, failure: Failure) -> PithError:
    error: PithError
    if failure.error is None:
        error = RankFailedError(
            "run.rank-failed",
            what=f"rank {failure.rank} failed at {_position(job, failure.rank)}",
            found=failure.summary,
        )
    else:
        error = _rebuilt(dict(failure.error))
    if not failure.is_stop:  # where a rank stood when it stopped is of no interest
        error.add_note(failure.trace)
    return error


def _rebuilt(fields: dict[str, Any]) -> PithError:
    """The PithError that a rank raised, with the exit status of its kind."""
    status = fields.pop("status")
    faults = tuple(
        Fault(**{**fault, "nearest": tuple(fault["nearest"])}) for fault in fields.pop("faults")
    )
    kind = next((kind for kind in KINDS if kind.exit_status == status), PithError)
    return kind(fields.pop("code"), faults=faults, **fields)


def _lost(job: Job, *, rank: int, code: int) -> PithError:
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return RunFailedError(
        "run.rank-lost",
        what=f"rank {rank} {end} at {_position(job, rank)}",
        next_step="look for the out-of-memory killer (dmesg), then run again"
        if code == -signal.SIGKILL
        else "run again with --debug",
    )


def _silent(job: Job, failure: Failure, *, silent: list[int]) -> PithError:
    where = "; ".join(f"rank {rank} at {_position(job, rank)}" for rank in silent)
    error = RunFailedError(
        "run.rank-silent",
        what=f"a rank stopped answering: {where}",
        found=f"rank {failure.rank} waited in vain: {failure.summary}",
        next_step="run again; --timeout sets how long a rank waits",
    )
    error.add_note(failure.trace)
    return error


def _position(job: Job, rank: int) -> str:
    position = Progress.read(job.progress_path(rank))
    return str(position) if position else "its start"
