"""Builds, verifies and simulates the tables of every schedule: does each of them hold?

Usage: python tools/campaigns/schedule_tables.py [--pp 16] [--micro-batches 64] [--workers N]
           [--names NAME ...]

Takes every number of ranks up to --pp and of micro-batches up to --micro-batches, and one to four
stages a rank where a schedule can vary them. Those that feed both ends are built where both numbers
are even. Prints tables, violations and seconds of work by schedule, and the first faults in
full; exit 1 when anything was violated, an exception was raised or a schedule had no table.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pith.errors import RequestError
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build, placement
from pith.schedule.simulate import simulate
from pith.schedule.verify import verify

VIRTUAL = (1, 2, 3, 4)
MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Work:
    """The tables of one schedule on `pp` ranks; `virtual` None is what the schedule has."""

    name: str
    virtual: int | None
    pp: int
    micro_batches: range


@dataclass(frozen=True, slots=True)
class Outcome:
    title: str
    num_tables: int
    faults: tuple[str, ...]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    names = (*SCHEDULES, *SIMULATION_ONLY)
    parser.add_argument("--names", nargs="+", default=names, choices=names, metavar="NAME")
    options = parser.parse_args()
    chosen = [
        (name, virtual)
        for name in dict.fromkeys(options.names)
        for virtual in (VIRTUAL if varies(name) else (None,))
    ]
    works = [
        Work(name, virtual, pp, micro_batches)
        for name, virtual in chosen
        for pp, micro_batches in sizes(name, options.pp, options.micro_batches)
    ]
    start = time.monotonic()
    with multiprocessing.Pool(options.workers) as pool:
        outcomes = list(pool.imap(run, works))
    status = summary([title(*each) for each in chosen], outcomes)
    print(f"{time.monotonic() - start:.0f} s with {options.workers} workers")
    return status


def title(name: str, virtual: int | None) -> str:
    return name if virtual is None else f"{name}, {virtual} a rank"


def varies(name: str) -> bool:
    """Whether the schedule takes any number of stages a rank; none has three unasked."""
    try:
        placement(name, pp=2, virtual=3)
    except RequestError:
        return False
    return True


def sizes(name: str, pp: int, micro_batches: int) -> Iterator[tuple[int, range]]:
    step = 2 if name in SIMULATION_ONLY else 1
    for each in range(step, pp + 1, step):
        yield each, range(step, micro_batches + 1, step)


def run(work: Work) -> Outcome:
    """Go through the tables of one piece of work; faults name the table."""
    faults = []
    named = title(work.name, work.virtual)
    start = time.process_time()
    for num_micro_batches in work.micro_batches:
        where = f"{named}, pp {work.pp}, micro-batches {num_micro_batches}"
        try:
            faults += [f"{where}: {fault}" for fault in judge(work, num_micro_batches)]
        except Exception as error:
            faults.append(f"{where}: {type(error).__name__}: {error}")
    seconds = time.process_time() - start
    return Outcome(named, len(work.micro_batches), tuple(faults), seconds)


def judge(work: Work, num_micro_batches: int) -> Iterator[str]:
    table = build(work.name, pp=work.pp, num_micro_batches=num_micro_batches, virtual=work.virtual)
    yield from map(str, verify(table))
    plan = simulate(table)
    if not plan.makespan >= max(plan.work) > 0:
        yield f"makespan {plan.makespan}, work of the busiest rank {max(plan.work)}"


def summary(titles: list[str], outcomes: list[Outcome]) -> int:
    """Print the table and the first faults; the exit status."""
    print(f"{'schedule':24} {'tables':>7} {'violations':>11} {'seconds':>8}")
    is_empty = False
    for name in [*titles, "all"]:
        parts = [outcome for outcome in outcomes if name in (outcome.title, "all")]
        num_tables = sum(part.num_tables for part in parts)
        num_faults = sum(len(part.faults) for part in parts)
        seconds = sum(part.seconds for part in parts)
        print(f"{name:24} {num_tables:7} {num_faults:11} {seconds:8.1f}")
        is_empty |= num_tables == 0
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    print("\n".join(faults[:MOST_SHOWN]), end="\n" if faults else "")
    return 1 if faults or is_empty else 0


if __name__ == "__main__":
    sys.exit(main())
