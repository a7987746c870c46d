"""Kills whole runs at random times and starts the same command again: is nothing ever lost?

Usage: python tools/campaigns/kill_and_resume.py OUT_DIR [--kills 100] [--seed 0] [--pp 2] [--ep 1]
           [--asynchronous] [--seconds S]

A micro run saves every 2 steps and keeps 2 checkpoints. Half of the kills (SIGKILL to all of its
processes at once) fall uniformly over the life of a process, a fifth of these before its first
step; half wait for a save to begin, and fall within 30 ms of that. After each, the newest complete
checkpoint verifies and is no older than any seen before, no process is left and at most one save
interval is lost (two in the background, where one save may wait for another); the next process
resumes there. A run that ends has status 0 and, step for step, the losses, gradient norms, rates
and samples of an unbroken run, to the bit. Prints a table, writes kill_and_resume.json; exit 1 when
anything was violated. With --seconds it begins no kill after that time.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import kill_ranks

from pith.checkpoint.manifest import faults
from pith.checkpoint.shelf import Found, Shelf
from pith.cli import app
from pith.data.tokenize import tokenize
from pith.run.metrics import read_steps

STEPS, EVERY, KEEP = 60, 2, 2
SAVE_WINDOW_S = 0.030
POLL_S = 0.001
LONGEST_LIFE_S = 120.0
MOST_SAVES_PASSED = 4  # before a kill inside of one
AT_START = 0.2  # share of the uniform kills that fall before the first step
COMPARED = ("loss", "grad_norm", "lr", "sample_digest")
MICRO = kill_ranks.MICRO | {
    "model.fields.num_hidden_layers": 4,
    "model.fields.num_attention_heads": 4,
    "model.fields.num_key_value_heads": 2,
    "training.steps": STEPS,
    "optimizer.warmup_steps": 5,
    "validation.num_sequences": 3,
    "checkpoint.every": EVERY,
    "checkpoint.keep": KEEP,
}
Leftovers = dict[str, int]  # names of interrupted saves and when they last changed


@dataclass(frozen=True)
class Kill:
    """One life of a run, and what was wrong after it; `kind` is None where it ended by itself."""

    run: int
    kind: str | None
    seconds: float
    hit: str  # what it fell into: start, step, save, retire; end
    last_step: int  # that was written down
    newest_step: int  # of a complete checkpoint
    violations: list[str] = field(default_factory=list)


class Command:
    """The same `pith train` again and again, forked from here, where torch is imported already."""

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        self.words, self.cwd = words, cwd
        self.run_dir = cwd / "run"
        self.shelf = Shelf(self.run_dir / "checkpoints")

    def start(self) -> BaseProcess:
        """Start it in a session of its own."""
        arguments = (self.words, self.cwd)
        process = multiprocessing.get_context("fork").Process(target=console, args=arguments)
        process.start()
        return process

    def steps(self) -> list[dict[str, Any]]:
        return read_steps(self.run_dir / "metrics.jsonl")

    def resumed(self) -> list[int]:
        """The step at which each process resumed so far."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            json.loads(line)["step"] for line in lines if line.startswith('{"event": "resumed"')
        ]

    def temporaries(self) -> Leftovers:
        """The saves that are not complete, and when their folders changed, in ns."""
        found = {}
        for path in self.shelf.path.glob("step-*.tmp"):
            try:
                found[path.name] = path.stat().st_ctime_ns
            except FileNotFoundError:
                continue
        return found


@dataclass(frozen=True)
class Reference:
    """An unbroken run: what it measured, and how long a process starts and trains."""

    steps: list[dict[str, Any]]
    start_s: float
    training_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pp", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--ep", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for room in ("torch._dynamo", "pith.launch.elastic", "pith.train.loop"):
        importlib.import_module(room)  # once here, not in every process that is forked
    options.out.mkdir(parents=True, exist_ok=True)
    layout = {"parallel.pp": options.pp, "parallel.ep": options.ep}
    saving = {"checkpoint.asynchronous": str(options.asynchronous).lower()}
    values = {**MICRO, **layout, **saving, "data.corpus": corpus(options.out)}
    settings = [f"--set={name}={value}" for name, value in values.items()]
    words = ["train", "--device=cpu", "--run-dir=run", *settings]
    reference = unbroken(Command(words, fresh(options.out / "reference")))
    print(f"a process takes {reference.start_s:.2f} s to its first step,", end=" ")
    print(f"then {reference.training_s:.2f} s to the end", flush=True)
    lives = []
    for life in campaign(words, reference, options):
        lives.append(life)
        wrong = "; ".join(life.violations)
        place = f"step {life.last_step:2d}, newest {life.newest_step:2d}"
        told = f"{life.kind or 'finished':8} in {life.hit:6} {place}  {wrong}"
        print(f"{len(lives):3d} run {life.run:2d} {life.seconds:5.2f} s  {told}", flush=True)
    (options.out / "kill_and_resume.json").write_text(json.dumps([asdict(k) for k in lives]))
    return summary(lives)


def summary(lives: Sequence[Kill]) -> int:
    kills = [life for life in lives if life.kind]
    print(f"{'':8} kills  start  step  save  retire  most steps lost")
    for kind in ("uniform", "save"):
        own = [kill for kill in kills if kill.kind == kind]
        start, step, save, retire = (
            sum(kill.hit == hit for kill in own) for hit in ("start", "step", "save", "retire")
        )
        lost = max((kill.last_step - kill.newest_step for kill in own), default=0)
        print(f"{kind:8} {len(own):5d} {start:6d} {step:5d} {save:5d} {retire:7d} {lost:16d}")
    num_violations = sum(len(life.violations) for life in lives)
    num_finished = len(lives) - len(kills)
    print(f"{num_violations} violations in {len(kills)} kills and {num_finished} finished runs")
    return 1 if num_violations or not kills or not num_finished else 0


def corpus(out: Path) -> Path:
    """A small corpus, tokenized once for all runs."""
    folder, draw = fresh(out / "corpus"), random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    texts = [" ".join("".join(draw.choices(syllables, k=2)) for _ in range(120)) for _ in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenize([str(folder / "texts.jsonl")], out=folder / "tokens", workers=1)
    return (folder / "tokens").absolute()


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def unbroken(command: Command) -> Reference:
    begun, process = time.monotonic(), command.start()
    until(lambda: bool(command.steps()), process)
    first_step = time.monotonic()
    process.join(LONGEST_LIFE_S)
    ended, steps = time.monotonic(), [exact(line) for line in command.steps()]
    assert (process.exitcode, len(steps)) == (0, STEPS), (command.cwd / "stderr").read_text()
    return Reference(steps, first_step - begun, ended - first_step)


def campaign(
    words: Sequence[str], reference: Reference, options: argparse.Namespace
) -> Iterator[Kill]:
    """Kill runs and let them end, until there were enough kills and the last run has ended."""
    draw, deadline = random.Random(options.seed), time.monotonic() + options.seconds
    kinds = ["uniform", "save"] * (options.kills // 2) + ["uniform"] * (options.kills % 2)
    draw.shuffle(kinds)
    intervals = 2 if options.asynchronous else 1
    number = 0
    while kinds and time.monotonic() < deadline:
        command = Command(words, fresh(options.out / f"run-{number:03d}"))
        best, is_sound, is_over = 0, True, False
        while not is_over:
            kind = kinds.pop() if kinds and time.monotonic() < deadline else None
            life = one_life(command, number, kind, draw=draw, reference=reference, best=best)
            if life.last_step - life.newest_step > intervals * EVERY:
                life.violations.append(f"{life.last_step - life.newest_step} steps lost")
            if kind and not life.kind:
                kinds.append(kind)  # it came too late
            best, is_over = max(best, life.newest_step), life.kind is None
            is_sound = is_sound and not life.violations
            yield life
        if is_sound:
            shutil.rmtree(command.cwd)
        number += 1


def one_life(
    command: Command,
    number: int,
    kind: str | None,
    *,
    draw: random.Random,
    reference: Reference,
    best: int,
) -> Kill:
    """Start the command, kill it as `kind` says unless it ends before, and look at what is left."""
    before, num_resumed = command.temporaries(), len(command.resumed())
    newest_before = command.shelf.newest()
    begun, process = time.monotonic(), command.start()
    match kind:
        case "save":
            wait_for_save(command, process, before, draw)
        case "uniform":
            wait_for_time(command, process, reference, draw)
        case _:
            process.join(LONGEST_LIFE_S)
    is_killed = process.exitcode is None
    if is_killed:
        os.killpg(session_of(process), signal.SIGKILL)
        process.join()
    seconds = time.monotonic() - begun
    newest, left, steps = command.shelf.newest(), command.temporaries(), command.steps()
    resumed = command.resumed()[num_resumed:]
    violations = [
        *([f"still there after {seconds:.0f} s"] if kind is None and is_killed else []),
        *survivors(process),
        *wrong_checkpoint(newest, best=best),
        *(
            f"resumed at step {step}, not {_step(newest_before)}"
            for step in resumed
            if step != _step(newest_before)
        ),
        *([] if is_killed else wrong_end(command, process, reference)),
    ]
    new = [name for name, changed in left.items() if before.get(name) != changed]
    hit = hit_of(new, _step(newest), is_started=len(steps) > _step(newest_before))
    is_end = not is_killed or kind is None
    return Kill(
        run=number,
        kind=None if is_end else kind,
        seconds=seconds,
        hit="end" if is_end else hit,
        last_step=steps[-1]["step"] if steps else 0,
        newest_step=_step(newest),
        violations=violations,
    )


def hit_of(new: Sequence[str], newest_step: int, *, is_started: bool) -> str:
    """What a kill fell into, by the temporary folders that its process left."""
    if any(int(name[len("step-") : -len(".tmp")]) > newest_step for name in new):
        return "save"
    return "retire" if new else "step" if is_started else "start"


def wait_for_save(
    command: Command, process: BaseProcess, before: Leftovers, draw: random.Random
) -> None:
    """Pass over some saves, then wait for one to begin and for a moment of it."""
    begun, wanted = set[str](), 1 + draw.randint(0, MOST_SAVES_PASSED)

    def is_reached() -> bool:
        now = command.temporaries().items()
        begun.update(name for name, changed in now if before.get(name) != changed)
        return len(begun) >= wanted

    until(is_reached, process)
    time.sleep(draw.uniform(0, SAVE_WINDOW_S))


def wait_for_time(
    command: Command, process: BaseProcess, reference: Reference, draw: random.Random
) -> None:
    """Wait for a random time before the first step, or between that and the end."""
    if draw.random() < AT_START:
        process.join(draw.uniform(0, reference.start_s))
        return
    newest = _step(command.shelf.newest())
    begun = time.time()
    trained = command.run_dir / "trace"  # emptied before the first step of a process, then written

    def is_trained() -> bool:
        files = [path.stat() for path in trained.glob("*")]
        return any(file.st_mtime > begun and file.st_size for file in files)

    until(is_trained, process)
    process.join(draw.uniform(0, reference.training_s * (STEPS - newest) / STEPS))


def until(is_reached: Callable[[], bool], process: BaseProcess) -> None:
    """Return once it is so, or the process has ended."""
    deadline = time.monotonic() + LONGEST_LIFE_S
    while process.exitcode is None and not is_reached() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def wrong_checkpoint(newest: Found | None, *, best: int) -> Iterator[str]:
    """What a kill should not have done to the checkpoints."""
    if _step(newest) < best:
        yield f"newest complete checkpoint {_step(newest)}, though {best} was there"
    if newest is not None and newest.manifest is not None:
        wrong = faults(newest.path, newest.manifest, checksums=True, strangers=True)
        yield from map(str, wrong)


def wrong_end(command: Command, process: BaseProcess, reference: Reference) -> Iterator[str]:
    """How a run that ended by itself differs from the unbroken one."""
    if process.exitcode != 0:
        yield f"exit status {process.exitcode}: {(command.cwd / 'stderr').read_text()[-300:]!r}"
    steps = [exact(line) for line in command.steps()]
    if (numbers := [line["step"] for line in steps]) != list(range(1, STEPS + 1)):
        yield f"steps {numbers}"
    wrong = [a["step"] for a, b in zip(steps, reference.steps, strict=False) if a != b]
    if wrong:
        yield f"{len(wrong)} steps differ, the first is {wrong[0]}"


def exact(line: dict[str, Any]) -> dict[str, Any]:
    """What must not differ, floats as hex."""
    values = {key: line[key] for key in ("step", *COMPARED)}
    return {key: v.hex() if isinstance(v, float) else v for key, v in values.items()}


def _step(found: Found | None) -> int:
    return found.step if found is not None and found.step is not None else 0


def session_of(process: BaseProcess) -> int:
    """The session that the process leads; it may have to lead it first."""
    assert process.pid is not None
    while os.getsid(process.pid) != process.pid:
        time.sleep(POLL_S)
    return process.pid


def survivors(process: BaseProcess) -> Iterator[str]:
    """What of a session is still there a second after its leader; it is ended."""
    assert process.pid is not None
    deadline = time.monotonic() + 1
    while (left := in_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        yield f"{len(left)} processes left"


def in_session(session: int) -> list[int]:
    """What runs in a session, zombies aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(own) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def console(words: Sequence[str], cwd: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["pith", *words]
    app.main()


if __name__ == "__main__":
    sys.exit(main())
