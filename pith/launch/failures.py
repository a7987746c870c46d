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

from pith.errors import Fault, PithError, RequestError, RunFailedError, UnavailableError
from pith.run.job import Job
from pith.run.progress import Progress

# What gloo, NCCL and their stores say when the other side is gone or silent.
COMMUNICATION = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|broken pipe|timed out|timeout"
    r"|NCCL|TCPStore|socket",
    re.IGNORECASE,
)
KINDS = (RequestError, UnavailableError, RunFailedError)


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


def describe(error: BaseException, *, rank: int) -> Failure:
    """The failure of `rank` as a value that survives the process."""
    fields = None
    if isinstance(error, PithError):
        faults = [asdict(fault) for fault in error.faults]
        fields = {"status": error.exit_status, "faults": faults, **error.as_dict()}
    return Failure(
        rank=rank,
        time=time.time(),
        communication=is_communication(error),
        summary=f"{type(error).__name__}: {error}".splitlines()[0],
        trace="".join(traceback.format_exception(error)).rstrip(),
        error=fields,
    )


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


def write(failure: Failure, *, folder: Path) -> None:
    """Leave `failure` for the parent: whole, even if this process is killed while writing."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"rank-{failure.rank}.part"
    part.write_text(json.dumps(asdict(failure)))
    part.replace(folder / f"rank-{failure.rank}.json")


def read(folder: Path) -> list[Failure]:
    """Every failure left in `folder`, earliest first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda failure: failure.time)


def verdict(job: Job, *, exit_codes: Mapping[int, int], num_ranks: int) -> PithError:
    """The one error that tells why the job ended.

    `exit_codes` holds what the launcher saw first: rank to exit code, negative for a signal. A
    rank that ended and left no word comes first (except by SIGABRT, with which NCCL ends a
    victim), then the earliest failure of a rank's own, then a rank that went silent, and last a
    failure in communication.
    """
    failures = read(job.failures_dir)
    told = {failure.rank for failure in failures}
    own = [failure for failure in failures if not failure.communication]
    for rank, code in exit_codes.items():
        if rank not in told and not (own and code == -signal.SIGABRT):
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
