"""Several ranks on this machine: forked processes that meet over gloo."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer step imports it: once here, not in every rank
import torch.distributed as dist
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("reproducible", derandomize=True)
settings.load_profile("reproducible")

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Call `run_ranks(n, function, *args)`: function(*args) in n ranks of one process group.

    Returns what each rank returned. A rank that raises fails the test with its traceback.
    """

    def run(num_ranks: int, function: Callable[..., Any], *args: Any, seconds: int = 200) -> list:
        folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, function, args))
            for rank in range(num_ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds)
            if worker.is_alive():
                worker.kill()
        failures = sorted(folder.glob("*.error"), key=os.path.getmtime)
        assert not failures, failures[0].read_text()
        codes = [worker.exitcode for worker in workers]
        assert codes == [0] * num_ranks, f"exit codes {codes}"
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(num_ranks)]

    return run


def _rank(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)  # mends the forked pool of threads, which autograd cannot
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = function(*args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()  # a rank that leaves early breaks what the others still do
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
