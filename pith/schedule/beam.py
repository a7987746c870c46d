"""A search for small problems: after each operation only the most promising schedules are kept.

A schedule goes on with the rank on which something can end first: it runs any of its options, or
waits for a message that has not been sent. How promising it is says a lower bound of its makespan:
no rank ends before its own work is done, no micro-batch before it has gone the rest of its way.
"""

from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from math import inf
from operator import le
from typing import NamedTuple

from pith.schedule.costs import Number
from pith.schedule.partial import NONE, Option, Partial, Problem

_LESS = 1 - 1e-9  # one makespan is below another when it is so much shorter
_SHARE = 0.2  # of the mean of what bounds each rank, in what makes a schedule promising

Waits = tuple[bool, ...]  # by rank, whether it waits for a message
_Counts = tuple[tuple[int, int, int, int], ...]  # by lane of a rank: next F, next I, next W
# Served in the order of promise, time spent and number; then the lower bound, and what it is of.
Node = tuple[Number, Number, int, Number, Partial, Waits]


def search(problem: Problem, *, pairs: bool, width: int, below: Number) -> Partial | None:
    """A schedule that ends before `below`, if keeping `width` after each operation finds one.

    For placements that keep a stage on one rank.
    """
    beam = _Beam(problem, pairs=pairs, width=width, below=below)
    for step in range(beam.num_steps):
        beam.expand(step)
    ended = beam.waves[beam.num_steps]
    return ended[0][4] if ended else None


class _Beam:
    """`waves[n]` are the schedules in which n operations have run."""

    def __init__(self, problem: Problem, *, pairs: bool, width: int, below: Number) -> None:
        self.bounds, self.width = Bounds.of(problem, pairs=pairs), width
        self.cutoff = below * _LESS
        self.num_steps = 3 * problem.num_micro_batches * len(problem.lanes)
        self.waves: list[list[Node]] = [[] for _ in range(self.num_steps + 1)]
        self.count = 0
        self._add(0, Partial(problem, pairs=pairs), (False,) * len(problem.of_rank), least=0)

    def expand(self, step: int) -> None:
        """Go on from the best of a wave; from none that is in all later than one with its past."""
        wave, kept = self.waves[step], 0
        seen: dict[tuple[int, ...], list[list[Number]]] = {}
        while wave and kept < self.width:
            *_, least, partial, waits = heappop(wave)
            past = (*partial.next_f, *partial.next_i, *partial.next_w, *waits)
            times = partial.free + partial.ready_f + partial.ready_i
            others = seen.setdefault(past, [])
            if not any(all(map(le, other, times)) for other in others):
                others.append(times)
                self._branch(step, partial, waits, least=least)
                kept += 1
        wave.clear()

    def _branch(self, step: int, partial: Partial, waits: Waits, *, least: Number) -> None:
        rank, options = _next(partial, waits)
        if not options:
            return
        waiting = tuple(wait or other == rank for other, wait in enumerate(waits))
        self._add(step, partial, waiting, least=least)
        for option in options:
            child = partial.copy()
            told = child.run(rank, option)
            still = tuple(wait and other not in told for other, wait in enumerate(waits))
            num_run = sum(number != NONE for number in option[2:])
            self._add(step + num_run, child, still, least=least)

    def _add(self, step: int, partial: Partial, waits: Waits, *, least: Number) -> None:
        bound, mean = self.bounds.makespan(partial, waits)
        least = max(least, bound)
        if least < self.cutoff:
            self.count += 1
            promise = least + mean * _SHARE
            node = (promise, sum(partial.free), self.count, least, partial, waits)
            heappush(self.waves[step], node)


def _next(partial: Partial, waits: Waits) -> tuple[int, list[Option]]:
    """The rank on which something can end first, and its options; none where all wait."""
    found: tuple[int, list[Option]] = (NONE, [])
    soonest = inf
    for rank, wait in enumerate(waits):
        options = [] if wait else partial.options(rank)
        end = min((option[0] + option[1] for option in options), default=inf)
        if end < soonest:
            soonest, found = end, (rank, options)
    return found


class _Leg(NamedTuple):
    """F or I of a stage on the way of a micro-batch.

    `rest` is the time from its start to the end of the way, `delay` that until the next leg.
    """

    number: int
    rank: int
    forward: bool
    time: Number
    delay: Number
    rest: Number


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of the makespan of all that begins with a partial schedule.

    `gains` are by lane what a pair saves by its F, by its B, and of I alone by its B.
    """

    problem: Problem
    way: tuple[_Leg, ...]
    gains: tuple[tuple[Number, Number, Number], ...]
    known: dict[_Counts, tuple[Number, bool]]

    @classmethod
    def of(cls, problem: Problem, *, pairs: bool) -> "Bounds":
        pair = problem.pair if pairs else 1
        gains = (
            (
                lane.f * (1 - pair),
                (lane.i + lane.w) * (1 - pair),
                max(0, lane.i * (1 - pair) - lane.w * pair),
            )
            for lane in problem.lanes
        )
        return cls(problem, _way(problem), tuple(gains), {})

    def makespan(self, partial: Partial, waits: Waits) -> tuple[Number, Number]:
        """The bound, and the mean of the bounds by rank; infinity where a rank waits in vain.

        A rank that waits begins with what is not sent yet.
        """
        size, free = self.problem.num_micro_batches, partial.free
        least: Number = 0
        came: Number = 0
        begins: list[Number] = [inf] * len(waits)
        for number, rank, forward, time, delay, rest in self.way:
            micro = partial.next_f[number] if forward else partial.next_i[number]
            if micro < size:
                arrivals = partial.ready_f if forward else partial.ready_i
                ready = arrivals[number * size + micro]
                begin = came if ready == inf else ready
                begin = max(begin, free[rank])
                if begin < begins[rank] and (ready == inf or not waits[rank]):
                    begins[rank] = begin
                least = max(least, begin + (size - micro - 1) * time + rest)
                came = begin + time + delay
        for rank, own in enumerate(self.problem.of_rank):
            counts = tuple(
                [(n, partial.next_f[n], partial.next_i[n], partial.next_w[n]) for n in own]
            )
            if (left := self.known.get(counts)) is None:
                left = self.known[counts] = self._left(counts)
            time, owes = left
            if not waits[rank] and (owes or not time):
                begins[rank] = free[rank]
            begins[rank] += time
        return max(least, *begins), sum(begins) / len(begins)

    def _left(self, counts: _Counts) -> tuple[Number, bool]:
        """How long a rank still needs, and whether a W could run at once.

        It needs as long as all its work takes, and as all F and I and then the rest of the way of
        the last micro-batch. In no pair are F of the first micro-batch and I of the last.
        """
        size, owes = self.problem.num_micro_batches, False
        work: Number = 0
        way: Number = 0
        rest: Number = inf
        forwards: list[Number] = []
        backwards: list[Number] = []
        backwards_i: list[Number] = []
        for number, next_f, next_i, next_w in counts:
            lane, (by_f, by_b, by_i) = self.problem.lanes[number], self.gains[number]
            fi = (size - next_f) * lane.f + (size - next_i) * lane.i
            way += fi
            work += fi + (size - next_w) * lane.w
            owes = owes or next_w < next_i
            if next_i < size:
                rest = min(rest, self.way[-1 - number].rest - lane.i)
            forwards += [by_f] * min(size - next_f, size - 1)
            backwards += [by_b] * (size - next_i - 1)
            backwards_i += [by_i] * (size - next_i - 1)
        num_pairs = min(len(forwards), len(backwards))
        saved = sum(nlargest(num_pairs, forwards))
        work -= saved + sum(nlargest(num_pairs, backwards))
        way -= saved + sum(nlargest(num_pairs, backwards_i))
        return max(work, way + (rest if rest < inf else 0)), owes


def _way(problem: Problem) -> tuple[_Leg, ...]:
    """Through the forwards of all stages and back, the last leg first built."""
    legs: list[_Leg] = []
    for number, lane in enumerate(problem.lanes):
        below = problem.delay(number, number - 1) if number else 0
        rest = below + legs[-1].rest if legs else 0
        legs.append(_Leg(number, lane.rank, False, lane.i, below, lane.i + max(lane.w, rest)))
    for number, lane in reversed(tuple(enumerate(problem.lanes))):
        above = problem.delay(number, lane.above[0])
        rest = lane.f + above + legs[-1].rest
        legs.append(_Leg(number, lane.rank, True, lane.f, above, rest))
    return tuple(reversed(legs))
