"""The proof that a new family runs, each part in a process that imports the code as it is now."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pith.report import Check
from pith.scaffold.texts import config_path, facts_path, tiny_path

MOST_SECONDS = 300
READ = """
import json, sys
from pith.arch import examine
arch, faults = examine(json.load(open(sys.argv[1])))
print(json.dumps(arch.ignored))
sys.exit("; ".join(map(str, faults)) or None)
"""
# What turns the smallest recipe into two steps in this process.
SMALL = (
    *("parallel.pp=1", "parallel.ep=1", "parallel.schedule=1f1b", "training.steps=2"),
    *("training.sequence_length=32", "training.global_batch_size=2", "optimizer.warmup_steps=0"),
    *("validation.num_sequences=2", "checkpoint.every=0"),
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked, and the keys of the config that the family's facts do not read."""

    checks: tuple[Check, ...]
    unread: tuple[str, ...]


def prove(name: str, *, root: Path) -> Proof:
    """Check that the family reads its config, that its recipe is a plan, that a model trains."""
    read = _run(root, "-c", READ, config_path(name))
    unread = tuple(json.loads(read.stdout)) if read.stdout else ()
    plan = _run(root, "-m", "pith.cli", "train", name, "--dry-run")
    with TemporaryDirectory(prefix="pith-add-model-") as folder:
        changes = (f"model.config={root / tiny_path(name)}", *SMALL)
        options = [word for change in changes for word in ("--set", change)]
        place = ("--device", "cpu", "--run-dir", f"{folder}/run", "--resume", "never", "--json")
        trained = _run(root, "-m", "pith.cli", "train", "tiny-moe", *options, *place)
    checks = (
        _check("the facts read the config", read, wanted="no fault", where=facts_path(name)),
        _check("the recipe is a plan", plan, wanted="a plan", where=f"pith/recipes/{name}"),
        _check("a tiny model trains", trained, wanted="two finite steps", where=tiny_path(name)),
    )
    return Proof(checks, unread)


def _check(name: str, done: subprocess.CompletedProcess[str], *, wanted: str, where: str) -> Check:
    if done.returncode == 0:
        return Check(name, True, wanted, where=where)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    told = next((line for line in said if line.startswith("error: ")), "")
    found = told or (said[-1] if said else f"exit {done.returncode}")
    return Check(name, False, found, wanted, where)


def _run(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with the package of the checkout; one that takes too long has failed."""
    command: Sequence[str] = (sys.executable, *words)
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = dict(os.environ) | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"not done in {MOST_SECONDS} s")
