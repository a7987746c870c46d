"""A search for small problems: after each operation only the most promising schedules are kept.

A schedule goes on with the rank on which something can end first: it runs any of its options, or
waits for a message that has not been sent. How promising it is says a lower bound of its makespan:
no rank ends before its own work is done, no micro-batch before it has gone the rest of its way.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import le

from pith.schedule.costs import Number
from pith.schedule.partial import NONE, Option, Partial, Problem

_LESS = 1 - 1e-9  # one makespan is below another when it is so much shorter

Waits = tuple[bool, ...]  # by rank, whether it waits for a message
Node = tuple[Number, Number, int, Partial, Waits]  # in the order in which they are served


def search(problem: Problem, *, pairs: bool, width: int, below: Number) -> Partial | None:
    """A schedule that ends before `below`, if keeping `width` after each operation finds one.

    For placements that keep a stage on one rank.
    """
    beam = _Beam(problem, pairs=pairs, width=width, below=below)
    for step in range(beam.num_steps):
        beam.expand(step)
    ended = beam.waves[beam.num_steps]
    return ended[0][3] if ended else None


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
            least, _, _, partial, waits = heappop(wave)
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
        least = max(least, self.bounds.makespan(partial, waits))
        if least < self.cutoff:
            self.count += 1
            heappush(self.waves[step], (least, sum(partial.free), self.count, partial, waits))


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


@dataclass(frozen=True, slots=True)
class _Leg:
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

    `gain` and `gain_fi` are by rank the most that a pair saves, of all work and of F and I alone.
    """

    problem: Problem
    way: tuple[_Leg, ...]
    gain: tuple[Number, ...]
    gain_fi: tuple[Number, ...]

    @classmethod
    def of(cls, problem: Problem, *, pairs: bool) -> "Bounds":
        lanes, ranks = problem.lanes, range(len(problem.of_rank))
        saved = [
            (lanes[first].rank, lanes[first].f + lanes[second].i - time, lanes[second].w)
            for (first, second), (time, _) in problem.pairs.items()
            if pairs
        ]
        gain = (max((0, *(fi + w for own, fi, w in saved if own == rank))) for rank in ranks)
        gain_fi = (max((0, *(fi for own, fi, _ in saved if own == rank))) for rank in ranks)
        return cls(problem, _way(problem), tuple(gain), tuple(gain_fi))

    def makespan(self, partial: Partial, waits: Waits) -> Number:
        """Infinity where none can end. A rank that waits begins with what is not sent yet."""
        size = self.problem.num_micro_batches
        least: Number = 0
        came: Number = 0
        begins: list[Number] = [inf] * len(waits)
        for leg in self.way:
            micro = (partial.next_f if leg.forward else partial.next_i)[leg.number]
            if micro < size:
                arrivals = partial.ready_f if leg.forward else partial.ready_i
                ready = arrivals[leg.number * size + micro]
                begin = max(partial.free[leg.rank], came if ready == inf else ready)
                if begin < begins[leg.rank] and (ready == inf or not waits[leg.rank]):
                    begins[leg.rank] = begin
                least = max(least, begin + (size - micro - 1) * leg.time + leg.rest)
                came = begin + leg.time + leg.delay
        for rank, wait in enumerate(waits):
            least = max(least, self._work(partial, rank, begin=begins[rank], wait=wait))
        return least

    def _work(self, partial: Partial, rank: int, *, begin: Number, wait: bool) -> Number:
        """When `rank` has done its work, and the last micro-batch the rest of its way."""
        size, num_f, num_i = self.problem.num_micro_batches, 0, 0
        time_fi: Number = 0
        time_w: Number = 0
        rest: Number = inf
        for number in self.problem.of_rank[rank]:
            lane = self.problem.lanes[number]
            left_f, left_i = size - partial.next_f[number], size - partial.next_i[number]
            left_w = size - partial.next_w[number]
            num_f, num_i = num_f + left_f, num_i + left_i
            time_fi += left_f * lane.f + left_i * lane.i
            time_w += left_w * lane.w
            if left_w > left_i and not wait:
                begin = partial.free[rank]
            if left_i:
                rest = min(rest, self.way[-1 - number].rest - lane.i)
        if begin == inf:
            return inf if wait else partial.free[rank]
        most_pairs = min(num_f, num_i)
        end = begin + time_fi + time_w - most_pairs * self.gain[rank]
        return (
            end
            if rest == inf
            else max(end, begin + time_fi - most_pairs * self.gain_fi[rank] + rest)
        )


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
