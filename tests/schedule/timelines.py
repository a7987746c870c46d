"""Timelines to draw: plans, and plans as if they had been run and timed."""

import random
from dataclasses import replace

from pith.schedule.build import build
from pith.schedule.costs import Costs
from pith.schedule.simulate import UNIT, Span, simulate
from pith.schedule.timeline import Timeline

UNIT_S = 0.007  # what a time unit of the plan takes


def planned(name: str, *, pp: int, num_micro_batches: int, costs: Costs = UNIT) -> Timeline:
    return Timeline.planned(
        simulate(build(name, pp=pp, num_micro_batches=num_micro_batches), costs)
    )


def measured(plan: Timeline, *, jitter: float = 2e-4, shift: float = 0.0) -> Timeline:
    """The plan in seconds. Each time is up to `jitter` late, so that some spans overlap a little;
    every other rank has a clock that is `shift` behind."""
    late = random.Random(7)

    def seconds(span: Span, behind: float) -> Span:
        times = (UNIT_S * t + late.uniform(0, jitter) - behind for t in (span.start, span.end))
        return Span(span.slot, *times)

    rows = tuple(
        tuple(seconds(span, shift * (rank % 2)) for span in row)
        for rank, row in enumerate(plan.rows)
    )
    return replace(plan, rows=rows, unit="s", measured=True)
