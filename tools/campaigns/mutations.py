"""Breaks pith in known ways: is each fault seen by the commands that should, and nothing else?

Usage: python tools/campaigns/mutations.py [--jobs N] [--only NAME]... [--commands WORD]...
           [--corpus FOLDER] [--out FILE]

tests/broken/mutations holds the mutations: what is replaced in which file, the command lines that
must exit 1 on it with the words that they must say of it, and those that must exit 0. Each command
runs in a checkout of its own, cloned from a repository that is made of this tree as it is. Prints
two lines for each command and a summary; exit 1 where a fault escaped or a harmless change was
refused.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "broken" / "mutations"
RECIPE = "sensitive.toml"  # what commands train, beside the mutations
LEFT_OUT = (".git", "*.whl", ".venv", ".*_cache", "__pycache__", "runs", "shared", ".hypothesis")
DEADLINE_S = 500.0


@dataclass(frozen=True)
class Trial:
    """A mutation and one command: `says` is what it must say, None where it must hold."""

    mutation: str
    file: str
    found: str
    replaced: str
    command: str
    says: str | None


@dataclass(frozen=True)
class Outcome:
    """How a trial ended; `fault` is "" where it ended as it should."""

    mutation: str
    command: str
    wanted: str
    status: int | None
    failed: list[str]  # the checks that failed, or the error
    seconds: float
    fault: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--commands", action="append", default=[], metavar="WORD")
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trials = [
        trial
        for trial in trials_of(options.corpus)
        if is_chosen(trial, names=options.only, words=options.commands)
    ]
    with tempfile.TemporaryDirectory(prefix="pith-mutations-") as folder:
        repository = make_repository(Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(partial(run, repository), trials))
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return summary(outcomes)


def is_chosen(trial: Trial, *, names: Sequence[str], words: Sequence[str]) -> bool:
    """Whether it is of a mutation of these names, its command with one of these words; all are
    without."""
    of_these = not names or trial.mutation in names
    return of_these and (not words or any(word in trial.command for word in words))


def trials_of(folder: Path) -> Iterator[Trial]:
    """Every command of every mutation in the files of a folder."""
    for path in sorted(folder.glob("*.toml")):
        if path.name == RECIPE:
            continue
        for name, table in tomllib.loads(path.read_text()).items():
            edit = (name, table["file"], table["found"], table["replaced"])
            for command, says in table.get("caught", {}).items():
                yield Trial(*edit, command, says)
            for command in table.get("passes", ()):
                yield Trial(*edit, command, None)


def make_repository(folder: Path) -> Path:
    """A repository of one commit with this tree as it is."""
    root = folder / "repository"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT))
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    author = ("-c", "user.name=campaign", "-c", "user.email=campaign@localhost")
    git(root, *author, "commit", "--quiet", "--message", "as it is")
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


def run(repository: Path, trial: Trial) -> Outcome:
    """Run the command in a checkout with the mutation."""
    with tempfile.TemporaryDirectory(prefix="mutation-", dir=repository.parent) as folder:
        tree = Path(folder) / "tree"
        git(repository, "clone", "--quiet", str(repository), str(tree))
        apply(trial, tree)
        start = time.monotonic()
        status, report = execute(trial.command, tree, Path(folder))
        seconds = time.monotonic() - start
    outcome = judged(trial, status, report, seconds)
    tell(outcome)
    return outcome


def apply(trial: Trial, tree: Path) -> None:
    path = tree / trial.file
    text = path.read_text()
    assert text.count(trial.found) == 1, f"{trial.mutation}: {text.count(trial.found)} places"
    path.write_text(text.replace(trial.found, trial.replaced))


def execute(command: str, tree: Path, folder: Path) -> tuple[int | None, dict[str, Any]]:
    """Exit status and report of a command line in `tree`; None where it had to be ended."""
    out = folder / "report.json"
    words = [sys.executable, "-m", "pith.cli", *shlex.split(command), "--out", str(out)]
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=tree,
            env=os.environ | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if out.exists():
        return status, json.loads(out.read_bytes())
    last = (folder / "output").read_text(errors="replace").strip().splitlines()[-1:]
    return status, {"checks": [], "data": {}, "error": {"what": "; ".join(last)}}


def judged(trial: Trial, status: int | None, report: dict[str, Any], seconds: float) -> Outcome:
    failed = [
        f"{check['name']}: {check['found']} ({check['where']})"
        for check in report["checks"]
        if not check["ok"]
    ]
    failed += [str(report["error"]["what"])] if report["error"] else []
    told = " ".join((*failed, json.dumps(report["data"].get("first_difference"))))
    wanted = "exit 0" if trial.says is None else f"exit 1, {trial.says}"
    fault = ""
    if status != (0 if trial.says is None else 1):
        fault = f"exit status {status}"
    elif trial.says is not None and trial.says not in told:
        fault = f"nothing said of {trial.says}"
    return Outcome(trial.mutation, trial.command, wanted, status, failed, seconds, fault)


def tell(outcome: Outcome) -> None:
    first = outcome.failed[0] if outcome.failed else "all held"
    told = f"{outcome.fault.upper()}: {first}" if outcome.fault else first
    print(f"{outcome.seconds:5.0f} s  {outcome.mutation}  {outcome.command}", flush=True)
    print(f"         {told[:180]}", flush=True)


def summary(outcomes: Sequence[Outcome]) -> int:
    """Figures by kind of command; 1 where something did not end as it should."""
    total, good = Counter[str](), Counter[str]()
    for outcome in outcomes:
        is_fault = outcome.wanted != "exit 0"
        kind = f"{kind_of(outcome.command)} {'catches' if is_fault else 'lets pass'}"
        total[kind] += 1
        good[kind] += not outcome.fault
    for kind in sorted(total):
        print(f"{kind:40} {good[kind]:3d} of {total[kind]:3d}")
    escaped = [outcome for outcome in outcomes if outcome.fault]
    for outcome in escaped:
        ended = f"{outcome.fault}, wanted {outcome.wanted}"
        print(f"{outcome.mutation}: {outcome.command}: {ended}")
    mutations = {outcome.mutation for outcome in outcomes}
    print(
        f"{len(mutations)} mutations, {len(outcomes)} commands, {len(escaped)} not as they should"
    )
    return 1 if escaped or not outcomes else 0


def kind_of(command: str) -> str:
    words = shlex.split(command)
    if words[0] != "validate":
        return " ".join(words[:2])
    return f"validate {'--layouts' if '--layouts' in words else '--against'}"


if __name__ == "__main__":
    sys.exit(main())
