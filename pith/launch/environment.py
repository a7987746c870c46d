"""Whether this process is already one rank of a job that torchrun or SLURM started."""

import re
import shutil
import subprocess
from collections.abc import Mapping

from pith.errors import RequestError, UnavailableError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def joined(environ: Mapping[str, str]) -> bool:
    """True where an outer launcher started this process, so that pith starts no worker."""
    return _under_torchrun(environ) or _under_slurm(environ)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun that describe this process, from whoever started it.

    Under SLURM the first host of the step is the meeting point, on a port derived from the job id.
    Raises UnavailableError where the outer launcher leaves one out, RequestError for a value that
    is none.
    """
    torchrun = _under_torchrun(environ)
    names = TORCHRUN[:3] if torchrun else ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    num_ranks = _whole(environ, names[1], least=1)
    rank = _whole(environ, names[0], most=num_ranks - 1)
    local_rank = _whole(environ, names[2], most=num_ranks - 1)
    if torchrun:
        address = _wanted(environ, "MASTER_ADDR")
        if not address.strip():
            raise _impossible("MASTER_ADDR", address, wanted="a host name or an address")
    else:
        address = environ.get("MASTER_ADDR") or first_host(_slurm_hosts(environ))
    if torchrun or environ.get("MASTER_PORT"):
        port = str(_whole(environ, "MASTER_PORT", least=1, most=65535))
    else:
        port = slurm_port(str(_whole(environ, "SLURM_JOB_ID")))
    values = (str(rank), str(num_ranks), str(local_rank), address, port)
    return dict(zip(TORCHRUN, values, strict=True))


def world_size(environ: Mapping[str, str]) -> int | None:
    """The number of ranks of the outer job; None where there is none."""
    return int(rank_variables(environ)["WORLD_SIZE"]) if joined(environ) else None


def first_host(nodelist: str) -> str:
    """The first host name of a SLURM node list: "gpu[03-05,9],login" -> "gpu03".

    Asks scontrol where it exists, for lists with several brackets.
    """
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodelist]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    head = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", nodelist)
    if head is None:
        raise UnavailableError(
            "launch.nodelist",
            what="the node list names no host",
            found=repr(nodelist),
            wanted="a list such as gpu[03-05]",
            where="SLURM_NODELIST",
            next_step="set MASTER_ADDR to the first host of the job",
        )
    return f"{head[1]}{head[2] or ''}{head[3]}"


def slurm_port(job_id: str) -> str:
    """A port from the job id: the same on every rank, different for neighbouring jobs."""
    return str(20000 + int(job_id) % 20000)


def _under_torchrun(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ and "WORLD_SIZE" in environ


def _under_slurm(environ: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1"


def _slurm_hosts(environ: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return environ[name]
    return _wanted(environ, "SLURM_NODELIST")


def _wanted(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise UnavailableError(
            "launch.environment",
            what="the outer launcher left out a variable that a rank needs",
            found=f"no {name}",
            wanted=", ".join(TORCHRUN),
            where="environment",
            next_step="start the job with torchrun or srun, or unset RANK and WORLD_SIZE",
        )
    return environ[name]


def _whole(environ: Mapping[str, str], name: str, *, least: int = 0, most: int = 2**31 - 1) -> int:
    text = _wanted(environ, name)
    if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise _impossible(name, text, wanted=f"a whole number from {least} to {most}")


def _impossible(name: str, text: str, *, wanted: str) -> RequestError:
    return RequestError(
        "launch.environment",
        what="the outer launcher set a variable to what it cannot be",
        found=repr(text),
        wanted=wanted,
        where=name,
        next_step="start the job with torchrun or srun, or unset the variables of the launcher",
    )
