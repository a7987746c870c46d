"""The verdict over what several ranks left behind: the culprit first, never a victim."""

import signal
from pathlib import Path

import pytest
import torch

from pith.errors import Fault, PithError, RequestError, RunFailedError, StoppedError
from pith.launch.failures import (
    Failure,
    RankFailedError,
    describe,
    is_communication,
    reserve,
    verdict,
    write,
)
from pith.run.job import Job
from pith.run.progress import Progress

STOPPED = StoppedError("run.stopped", what="stopped by SIGTERM at step 3", next_step="run again")
GLOO = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("", "tiny", str(tmp_path), "cpu", "gloo", 60.0)


def leave(job: Job, rank: int, error: Exception, *, time: float) -> None:
    told = describe(error, rank=rank, job=job)
    failure = Failure(rank, time, told.communication, told.summary, told.trace, told.error)
    write(failure, folder=job.failures_dir)


def test_a_rank_with_its_own_error_beats_an_earlier_victim(job: Job) -> None:
    leave(job, 0, RuntimeError(GLOO), time=1.0)
    leave(job, 1, KeyError("cause"), time=2.0)
    leave(job, 2, KeyError("later"), time=3.0)

    error = verdict(job, exit_codes={0: 1}, num_ranks=3)

    assert isinstance(error, RankFailedError)
    assert "rank 1" in error.what
    assert error.__notes__[-1].endswith("KeyError: 'cause'")


def test_a_rank_killed_by_nccl_is_a_victim_when_another_raised(job: Job) -> None:
    leave(job, 1, KeyError("cause"), time=2.0)

    error = verdict(job, exit_codes={0: -signal.SIGABRT}, num_ranks=2)

    assert "rank 1" in error.what


def test_when_all_failed_in_communication_the_earliest_speaks(job: Job) -> None:
    leave(job, 0, RuntimeError(GLOO), time=2.0)
    leave(job, 1, RuntimeError(GLOO), time=1.0)

    error = verdict(job, exit_codes={0: 1}, num_ranks=2)

    assert isinstance(error, RankFailedError)
    assert "rank 1" in error.what


def test_a_stop_comes_back_without_a_trace_before_ranks_that_it_left_alone(job: Job) -> None:
    leave(job, 0, RuntimeError(GLOO), time=1.0)
    leave(job, 2, STOPPED, time=2.0)

    for exit_codes in ({0: 1}, {2: 1}, {1: 1}):  # rank 1 found no space for its word
        error = verdict(job, exit_codes=exit_codes, num_ranks=3)

        assert type(error) is StoppedError
        assert error.as_dict() == STOPPED.as_dict()
        assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM, 9])
def test_a_rank_that_died_beats_a_stop(job: Job, code: int) -> None:
    leave(job, 0, STOPPED, time=1.0)

    error = verdict(job, exit_codes={1: code}, num_ranks=2)

    assert type(error) is RunFailedError
    assert "rank 1" in error.what


def test_an_error_of_a_rank_itself_beats_an_earlier_stop(job: Job) -> None:
    leave(job, 0, STOPPED, time=1.0)
    leave(job, 1, KeyError("cause"), time=2.0)

    assert type(verdict(job, exit_codes={0: 1}, num_ranks=2)) is RankFailedError


def test_a_rank_that_ends_with_status_1_and_no_word_is_lost_where_nobody_stopped(job: Job) -> None:
    leave(job, 0, KeyError("victim"), time=1.0)

    assert "rank 1 ended with status 1" in str(verdict(job, exit_codes={1: 1}, num_ranks=2))


def test_an_error_of_pith_comes_back_with_kind_fields_and_faults(job: Job) -> None:
    faults = (Fault("data.corpus", "nothing", "a folder", ("embedded",)),)
    sent = RequestError("data.missing", what="no corpus", where="x", next_step="y", faults=faults)
    leave(job, 0, sent, time=1.0)

    error = verdict(job, exit_codes={0: 1}, num_ranks=1)

    assert type(error) is RequestError
    assert error.as_dict() == sent.as_dict()
    assert error.faults == faults


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Timed out waiting 3000ms for recv operation to complete"),
        RuntimeError("NCCL communicator was aborted on rank 1"),
        RunFailedError("x", what="in a slot"),
    ],
)
def test_communication_is_told_by_the_error_or_its_cause(error: Exception) -> None:
    error.__cause__ = None if isinstance(error, RuntimeError) else RuntimeError(GLOO)

    assert is_communication(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(GLOO),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA out of memory"),
        PithError("x", what="loss is nan"),
    ],
)
def test_an_error_of_the_rank_itself_is_no_communication(error: Exception) -> None:
    assert not is_communication(error)


def test_progress_of_a_rank_is_read_from_outside_and_a_long_slot_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "progress-0"
    assert Progress.read(path) is None

    progress = Progress(path)
    assert Progress.read(path) is None
    progress.set(12, "F0.3|B7.1" * 20)
    progress.set(13, "optimizer")

    position = Progress.read(path)
    assert position is not None
    assert (position.step, position.slot) == (13, "optimizer")
    assert path.stat().st_size == 64


def _overflow() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.float32)
    return caught.value


def _too_much() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**56, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError("NCCL error: unhandled cuda error: out of memory"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        _too_much(),
        _overflow(),
    ],
)
def test_out_of_memory_is_a_failed_run_of_one_line_with_rank_and_place(
    job: Job, error: Exception
) -> None:
    Progress(job.progress_path(1)).set(3, "F0.1")
    leave(job, 0, RuntimeError(GLOO), time=1.0)
    leave(job, 1, error, time=2.0)

    found = verdict(job, exit_codes={0: 1}, num_ranks=2)

    assert type(found) is RunFailedError
    assert "rank 1 ran out of memory at step 3, slot F0.1" in str(found)
    assert len(str(found).splitlines()) == 1


def test_the_word_of_a_rank_fits_into_what_was_reserved(job: Job) -> None:
    reserve(job.failures_dir, rank=0)
    (part,) = job.failures_dir.iterdir()
    before = part.stat()

    leave(job, 0, KeyError("cause"), time=1.0)

    (left,) = job.failures_dir.iterdir()
    after = left.stat()
    assert left.name == "rank-0.json"
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert "cause" in str(verdict(job, exit_codes={0: 1}, num_ranks=1))
