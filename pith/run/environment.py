"""What a run was made with: code, versions, devices. Never a secret, and no import of torch."""

import hashlib
import importlib.util
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pith
from pith.report import environment

RECORDED_PACKAGES = ("torch", "triton", "numpy", "safetensors")
RECORDED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def run_environment() -> dict[str, Any]:
    """The content of environment.json; of the process environment only RECORDED_VARIABLES.

    `devices` lists the GPUs of the machine with their driver; it is empty without any.
    """
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or b""
    return {
        **environment(),
        **{name: _package_version(name) for name in RECORDED_PACKAGES},
        "devices": gpus.decode(errors="replace").splitlines(),
        "cpu_count": os.cpu_count(),
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        **code_version(Path(pith.__file__).parents[1]),
    }


def code_version(checkout: Path) -> dict[str, str | None]:
    """`commit` of the git checkout whose top is `checkout`, and `diff_sha256` of what differs.

    The hash covers changed and new files. Both are None outside a checkout or without git,
    `diff_sha256` also where nothing differs.
    """
    git = ("git", "-C", str(checkout))
    top = _output(*git, "rev-parse", "--show-toplevel")
    commit = _output(*git, "rev-parse", "HEAD")
    if top is None or commit is None or Path(os.fsdecode(top.strip())) != checkout.resolve():
        return {"commit": None, "diff_sha256": None}
    changed = _output(*git, "diff", "--binary", "HEAD") or b""
    new = _output(*git, "ls-files", "-z", "--others", "--exclude-standard") or b""
    digest = hashlib.sha256(changed)
    for name in filter(None, new.split(b"\0")):
        path = checkout / os.fsdecode(name)
        digest.update(name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    clean = not changed and not new
    return {"commit": commit.decode().strip(), "diff_sha256": None if clean else digest.hexdigest()}


def _package_version(name: str) -> str | None:
    """The installed version; of torch the build too ("2.13.0+cu130"), without importing it."""
    if name == "torch" and (build := _torch_build()) is not None:
        return build
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_build() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    written = Path(spec.origin).with_name("version.py")
    found = re.search(r"__version__ = '([^']+)'", written.read_text() if written.exists() else "")
    return found[1] if found else None


def _output(*command: str) -> bytes | None:
    """What a program prints, or None when there is no such program or it refuses."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
