"""Measures what a checkpoint costs by key and by byte.

    python tools/campaigns/checkpoint_speed.py [--folder DIR] [--ranks N ...] [CASE ...]

Each line saves and loads one set of tensors in DIR (a temporary folder by default): many small
ones, few large ones, and experts one by one against stacked. All of it takes minutes: CASE and
--ranks choose parts.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pith.checkpoint.metadata import METADATA
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import load, write

CASES = {  # tensors, shape of each
    "1,000 small": (1000, (16,)),
    "20,000 small": (20000, (16,)),
    "1 GB in 100": (100, (1024, 2560)),
    "experts one by one": (64 * 96, (64, 64)),
    "experts stacked": (96, (64, 64, 64)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help=f"of {', '.join(map(repr, CASES))}; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if unknown := [name for name in options.case if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(map(repr, CASES))}")
    print(
        f"{'case':20} ranks  MB     save s  load s  save us/key  load us/key  .metadata bytes/key"
    )
    for name in options.case or CASES:
        for num_ranks in options.ranks:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                _measure(name, num_ranks, Path(folder))


def _measure(name: str, num_ranks: int, folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    (folder / "saved").mkdir()
    ranks = [
        fork.Process(target=_rank, args=(name, rank, num_ranks, folder))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: a rank ended with {process.exitcode}")


def _rank(name: str, rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    number, shape = CASES[name]
    each = shape[0] // num_ranks
    pieces = {
        f"tensor.{k}": Piece(torch.randn(each, *shape[1:]), rank * each, shape)
        for k in range(number)
    }
    seconds = []
    for action in (
        lambda: write(pieces, folder / "saved", group=dist.group.WORLD),
        lambda: load(pieces, folder / "saved"),
    ):
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        size = number * torch.Size(shape).numel() * 4 / 1e6
        told = (folder / "saved" / METADATA).stat().st_size // number
        save, fill = seconds
        by_key = f"{save / number * 1e6:11.0f}  {fill / number * 1e6:11.0f}  {told}"
        print(
            f"{name:20} {num_ranks:5}  {size:5.0f}  {save:6.2f}  {fill:6.2f}  {by_key}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
