"""Where the ranks of a job compute, and what carries their tensors."""

from typing import Literal

import torch

from pith.errors import RequestError, UnavailableError
from pith.run.job import Backend, Device

DeviceChoice = Literal["auto", "cpu", "cuda"]
BackendChoice = Literal["auto", "gloo", "nccl"]


def choose(
    device: DeviceChoice, *, backend: BackendChoice, num_ranks: int
) -> tuple[Device, Backend]:
    """The device and the backend for `num_ranks` ranks on this machine.

    "auto" takes CUDA with NCCL where every rank gets a GPU of its own, else the CPU with gloo.
    Several ranks share a GPU only over gloo. Raises UnavailableError where the GPUs do not serve,
    RequestError for NCCL without CUDA.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        shared = backend == "gloo"
        device = "cuda" if num_gpus >= (1 if shared else num_ranks) else "cpu"
    if device == "cpu":
        if backend == "nccl":
            raise RequestError(
                "launch.backend",
                what="NCCL carries CUDA tensors only",
                found="nccl with the CPU",
                wanted="gloo",
                where="--backend",
                next_step="pith train --device cpu --backend gloo",
            )
        return "cpu", "gloo"
    wanted = 1 if backend == "gloo" else num_ranks
    if num_gpus < wanted:
        raise UnavailableError(
            "launch.gpus",
            what="too few GPUs on this machine",
            found=f"{num_gpus} for {num_ranks} ranks",
            wanted=f"{wanted} or more",
            where="--device cuda",
            next_step="use --device cpu, or --backend gloo to let ranks share a GPU",
        )
    return "cuda", "gloo" if backend == "gloo" else "nccl"
