"""Kills ranks of small runs, or lets them raise, at random places: do all runs end well and soon?

Usage: python tools/campaigns/kill_ranks.py OUT_DIR [--count 40] [--seed 0] [--pp 2] [--ep 2]

Each run is `pith train` on a micro recipe with one fault: raise or kill, at a random site, rank and
step, with a random exchange. It must end within 15 s of the fault, with exit status 4 and the
rank's own traceback last (raise) or 1 and one line that names rank, signal, step and slot (kill),
and leave neither a process nor weights. The time of a fault counts from the last step that was
written down before it. Prints times and violations, writes kill_ranks.json; exit 1 when anything
was violated.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pith.run.job import InjectedFault

LIMIT_S = 15.0
STEPS = 5
MARK = "PITH_CAMPAIGN_RUN"
STATUS = {"raise": 4, "kill": 1}
SITES = InjectedFault.SITES
EXCHANGES = ("collectives", "splits")
MICRO = {
    "model.fields.hidden_size": 32,
    "model.fields.num_hidden_layers": 8,
    "model.fields.head_dim": 8,
    "model.fields.moe_intermediate_size": 16,
    "model.fields.num_experts": 4,
    "training.steps": STEPS,
    "training.sequence_length": 32,
    "training.global_batch_size": 8,
    "training.micro_batch_size": 1,
    "optimizer.warmup_steps": 1,
}


@dataclass(frozen=True)
class Outcome:
    """One run: its fault, how it ended, and what was wrong with that."""

    fault: str
    exchange: str
    status: int | None  # None: it had to be ended
    seconds: float  # from the last step before the fault to the exit
    last_line: str
    violations: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pp", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--ep", type=int, default=2, choices=(1, 2, 4))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed)
    outcomes = []
    for number in range(options.count):
        step = draw.randint(2, STEPS)
        rank = draw.randrange(options.pp * options.ep)
        fault = f"{draw.choice(list(STATUS))}:{draw.choice(SITES)}:{rank}:{step}"
        layout = {"parallel.pp": options.pp, "parallel.ep": options.ep}
        exchange = draw.choice(EXCHANGES)
        outcome = one_run(options.out / f"run-{number:03d}", fault, layout, exchange=exchange)
        outcomes.append(outcome)
        wrong = "; ".join(outcome.violations)
        print(f"{number:3d} {fault:30} {exchange:11} {outcome.seconds:5.2f} s  {wrong}", flush=True)
    (options.out / "kill_ranks.json").write_text(
        json.dumps([asdict(o) for o in outcomes], indent=1)
    )
    return summary(outcomes)


def summary(outcomes: list[Outcome]) -> int:
    for action in STATUS:
        seconds = [o.seconds for o in outcomes if o.fault.startswith(action)]
        if seconds:
            print(
                f"{action:6} {len(seconds):3d} runs, from fault to exit:"
                f" median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"
            )
    num_violations = sum(len(outcome.violations) for outcome in outcomes)
    print(f"{num_violations} violations in {len(outcomes)} runs")
    return 1 if num_violations or not outcomes else 0


def one_run(folder: Path, fault: str, layout: Mapping[str, int], *, exchange: str) -> Outcome:
    """Train with the fault in `folder`, which is kept only where something was violated."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    values = {**MICRO, **layout, "parallel.exchange": exchange}
    settings = [f"--set={key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "pith.cli", "train", "--device=cpu", "--run-dir=run"]
    mark = uuid.uuid4().hex
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*command, *settings, f"--inject-fault={fault}"],
            cwd=folder,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        )
        status = ended(process)
    seconds = time.time() - time_before_fault(folder / "run")
    orphans = list(marked(mark))
    for orphan in orphans:
        os.kill(orphan, 9)
    lines = (folder / "stderr").read_text().splitlines() or [""]
    violations = [
        *wrong_end(fault, status, lines),
        *([f"{seconds:.1f} s from fault to exit"] if seconds > LIMIT_S else []),
        *([f"{len(orphans)} processes left"] if orphans else []),
        *(f"{path.name} left" for path in folder.glob("run/checkpoints/weights-*")),
        *fired(fault, folder / "run"),
    ]
    if not violations:
        shutil.rmtree(folder)
    return Outcome(fault, exchange, status, seconds, lines[-1], violations)


def ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(180)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def wrong_end(fault: str, status: int | None, lines: list[str]) -> Iterator[str]:
    """How exit status and last line differ from what they should be."""
    action, site, rank, step = fault.split(":")
    if status != STATUS[action]:
        yield f"exit status {status}, not {STATUS[action]}"
    if action == "raise":
        wanted = re.escape(f"pith.train.fault.InjectedError: ordered at {site} of step {step}")
    else:
        wanted = rf"error: rank {rank} was killed by SIGKILL at step {step}, slot [\w.&+|-]+; .*"
    if not re.fullmatch(wanted, lines[-1]):
        yield f"last line {lines[-1][:200]!r}"


def fired(fault: str, run: Path) -> Iterator[str]:
    """The steps before the fault are there, and none after it. At the optimizer the ranks have
    agreed on the step already, so that rank 0 may write it down."""
    _, site, _, step = fault.split(":")
    wanted = {int(step) - 1} | ({int(step)} if site == "optimizer" else set())
    if (found := len(steps_of(run))) not in wanted:
        yield f"{found} steps written, not {min(wanted)}"


def steps_of(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if "event" not in json.loads(line)]


def time_before_fault(run: Path) -> float:
    """When the last step was written down; the beginning of the run where there is none."""
    path = run / "metrics.jsonl"
    return (path if path.exists() else run.parent / "stdout").stat().st_mtime


def marked(mark: str) -> Iterator[int]:
    """Processes whose environment carries the mark of a run, zombies aside."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            continue


if __name__ == "__main__":
    sys.exit(main())
