"""Trains with every schedule: did each rank run its table, and is the measured time as planned?

Usage: python tools/campaigns/schedule_runs.py OUT_DIR [--names NAME ...] [--pp 2]
           [--recipe tiny-moe] [TRAIN_OPTION=VALUE ...]

Runs `pith train` once with each schedule that can be executed, on `--pp` ranks; options that it
does not know go to `pith train`, so that the same campaign runs on a CPU and on GPUs. Each run's
trace is verified against its table. Prints, planned from FLOPs and measured in the last traced
step, the share of the step that the busiest rank idles; draws the timelines of each run beside it.
Exit 1 when a run fails, a trace differs from its table or nothing was run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pith.schedule.build import SCHEDULES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", nargs="+", default=[*SCHEDULES, "auto"])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--recipe", default="tiny-moe")
    options, rest = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{'schedule':<12} {'stages':>6} {'micro':>5}  {'loss':>8}  planned  measured  step")
    words = [options.recipe, *rest]
    held = [one(name, options.out, options.pp, words) for name in options.names]
    return 0 if held and all(held) else 1


def one(name: str, out: Path, pp: int, words: list[str]) -> bool:
    """Train with one schedule, verify its trace, print its line."""
    run_dir = out / name
    settings = [f"--set=parallel.pp={pp}", f"--set=parallel.schedule={name}"]
    where = [f"--run-dir={run_dir}", "--resume=never"]
    trained = pith(out, name, "train", *words, *where, *settings)
    if trained is None:
        return False
    verified = pith(out, name, "schedule", "verify", "--trace", trained["run_dir"])
    times = pith(out, name, "schedule", "simulate", "--trace", trained["run_dir"])
    drawn = pith(
        out,
        name,
        *("schedule", "draw", "--trace", trained["run_dir"], "--format", "svg"),
        report=False,
    )
    if verified is None or times is None or drawn is None:
        return False
    (out / f"{name}.svg").write_text(drawn["text"])
    measured = times["measured"]
    print(
        f"{times['schedule']:<12} {times['num_stages']:>6} {times['num_micro_batches']:>5}  "
        f"{trained['last_loss']:>8.4f}  {times['bubble'] / times['makespan']:>7.1%}  "
        f"{measured['bubble'] / measured['makespan']:>8.1%}  {measured['makespan'] * 1e3:.0f} ms",
        flush=True,
    )
    return True


def pith(out: Path, name: str, *words: str, report: bool = True) -> dict[str, Any] | None:
    """Run one command; its data, or None where it failed, which is printed."""
    command = [sys.executable, "-c", "from pith.cli.app import main; main()", *words]
    asked = [*command, "--json"] if report else command
    done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=500)
    with (out / f"{name}.log").open("a") as log:
        log.write(f"$ pith {' '.join(words)}\n{done.stderr}\n")
    if done.returncode != 0:
        print(f"{name}: pith {' '.join(words[:2])} ended with {done.returncode}:\n{done.stderr}")
        return None
    data: dict[str, Any] = json.loads(done.stdout)["data"] if report else {"text": done.stdout}
    return data


if __name__ == "__main__":
    sys.exit(main())
