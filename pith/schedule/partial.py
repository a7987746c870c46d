"""A schedule half built: what has run, and what a rank can run next within a bound on activations.

Micro-batches pass every stage in ascending order, so three counts for each lane, a stage on a
rank, say all that has run. A forward may start only where room is left to bring the oldest
micro-batch that the rank has not brought forward all the way: nothing later is freed before it is
through. With that no bound ends in a deadlock, and no row that can end is left out.
"""

from dataclasses import dataclass
from math import inf

from pith.schedule.costs import Costs, Number, at
from pith.schedule.simulate import live
from pith.schedule.table import Kind, Op, Placement, Slot

NONE = -1  # no lane
SLACK = 1 + 1e-9  # the same floats, added up in another order, differ in their last digits

# What a rank can run next: start, time, and the lanes of its forward, of its input gradient and of
# its weight gradient. All three are a pair, both gradients without a forward are a B.
Option = tuple[Number, Number, int, int, int]
Trace = tuple["Trace", int, Option] | None  # earlier steps, then the rank and option of the last


@dataclass(frozen=True, slots=True)
class Lane:
    """A stage on a rank, and its micro-batches `first` to `end` - 1.

    `above` and `below` are the lanes of the next and the previous stage, by micro-batch.
    """

    stage: int
    rank: int
    first: int
    end: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    f: Number
    i: Number
    w: Number
    comm: Number
    activation: Number
    w_store: Number

    def runs(self, micro: int) -> bool:
        return self.first <= micro < self.end


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be scheduled. `pairs`: the time of F|B by lane, and the most that it adds."""

    num_micro_batches: int
    bound: Number
    lanes: tuple[Lane, ...]
    of_rank: tuple[tuple[int, ...], ...]
    pairs: dict[tuple[int, int], tuple[Number, Number]]
    pair: Number

    @classmethod
    def of(
        cls, placement: Placement, *, num_micro_batches: int, costs: Costs, max_live: Number
    ) -> "Problem":
        lanes = _lanes(placement, num_micro_batches, costs)
        of_rank = tuple(
            tuple(number for number, lane in enumerate(lanes) if lane.rank == rank)
            for rank in range(placement.pp)
        )
        pairs = {
            (first, second): _pair(lanes[first].stage, lanes[second].stage, costs)
            for own in of_rank
            for first in own
            for second in own
        }
        return cls(num_micro_batches, max_live * SLACK, lanes, of_rank, pairs, costs.pair)

    @property
    def is_one_way(self) -> bool:
        """Whether every stage is on one rank."""
        return all(lane.runs(0) and lane.runs(self.num_micro_batches - 1) for lane in self.lanes)

    def delay(self, lane: int, target: int) -> Number:
        """How long what `lane` sends to `target` is under way; 0 on the same rank and to NONE."""
        away = target != NONE and self.lanes[target].rank != self.lanes[lane].rank
        return self.lanes[lane].comm if away else 0


def _lanes(placement: Placement, num_micro_batches: int, costs: Costs) -> tuple[Lane, ...]:
    micros = range(num_micro_batches)
    held: dict[tuple[int, int], list[int]] = {}
    for stage in range(placement.num_stages):
        for micro in micros:
            held.setdefault((stage, placement.rank(stage, micro)), []).append(micro)
    number = {(stage, m): n for n, ((stage, _), own) in enumerate(held.items()) for m in own}
    return tuple(
        Lane(
            stage,
            rank,
            own[0],
            own[-1] + 1,
            above=tuple(number.get((stage + 1, micro), NONE) for micro in micros),
            below=tuple(number.get((stage - 1, micro), NONE) for micro in micros),
            f=at(costs.f, stage),
            i=at(costs.i, stage),
            w=at(costs.w, stage),
            comm=at(costs.comm, stage),
            activation=at(costs.activation, stage),
            w_store=at(costs.w_store, stage),
        )
        for (stage, rank), own in held.items()
    )


def _pair(first: int, second: int, costs: Costs) -> tuple[Number, Number]:
    slot = (Op(Kind.F, first, 1), Op(Kind.B, second, 0))
    return costs.slot(slot), live((slot,), costs)[0]


class Partial:
    """What has run: by lane the next micro-batch of each kind, by rank time and activations.

    `ready_f` and `ready_i` say when the input of a micro-batch is there, lane after lane: infinity
    while unknown. Overlapped pairs are only offered with `pairs`.
    """

    __slots__ = (
        "free",
        "held",
        "next_f",
        "next_i",
        "next_w",
        "pairs",
        "problem",
        "ready_f",
        "ready_i",
        "trace",
    )

    def __init__(self, problem: Problem, *, pairs: bool) -> None:
        self.problem, self.pairs = problem, pairs
        num_micro_batches, num_ranks = problem.num_micro_batches, len(problem.of_rank)
        self.next_f = [lane.first for lane in problem.lanes]
        self.next_i, self.next_w = self.next_f[:], self.next_f[:]
        self.ready_f: list[Number] = []
        for lane in problem.lanes:
            self.ready_f += [0 if lane.stage == 0 else inf] * num_micro_batches
        self.ready_i: list[Number] = [inf] * len(self.ready_f)
        self.free: list[Number] = [0] * num_ranks
        self.held: list[Number] = [0] * num_ranks
        self.trace: Trace = None

    def copy(self) -> "Partial":
        """A twin that goes its own way."""
        twin = Partial.__new__(Partial)
        twin.problem, twin.pairs, twin.trace = self.problem, self.pairs, self.trace
        twin.next_f, twin.next_i, twin.next_w = self.next_f[:], self.next_i[:], self.next_w[:]
        twin.ready_f, twin.ready_i = self.ready_f[:], self.ready_i[:]
        twin.free, twin.held = self.free[:], self.held[:]
        return twin

    def options(self, rank: int) -> list[Option]:
        """All that `rank` can run next: what has its inputs, or will when they have come."""
        problem, now = self.problem, self.free[rank]
        room = problem.bound - self.held[rank]
        found: list[Option] = []
        forwards, backwards = [], []
        for number in problem.of_rank[rank]:
            lane, at = problem.lanes[number], number * problem.num_micro_batches
            micro = self.next_f[number]
            if micro < lane.end and self.ready_f[at + micro] < inf and self._leaves_room(number):
                start = max(now, self.ready_f[at + micro])
                forwards.append((start, number))
                if lane.activation <= room:
                    found.append((start, lane.f, number, NONE, NONE))
            micro = self.next_i[number]
            if micro < lane.end and self.ready_i[at + micro] < inf:
                start = max(now, self.ready_i[at + micro])
                backwards.append((start, number))
                if lane.w_store <= lane.activation:
                    found.append((start, lane.i, NONE, number, NONE))
                else:  # splitting would hold more
                    found.append((start, lane.i + lane.w, NONE, number, number))
            if self.next_w[number] < micro:
                found.append((now, lane.w, NONE, NONE, number))
        if self.pairs and forwards and backwards:
            for ready, first in forwards:
                for there, second in backwards:
                    time, most = problem.pairs[first, second]
                    if most <= room and self.next_w[second] == self.next_i[second]:
                        found.append((max(ready, there), time, first, second, second))
        return found

    def _leaves_room(self, number: int) -> bool:
        """Whether the oldest micro-batch can come through after a forward of lane `number`."""
        lanes, own = self.problem.lanes, self.problem.of_rank[self.problem.lanes[number].rank]
        oldest = min(
            (
                micro
                for other in own
                if (micro := self.next_f[other] + (other == number)) < lanes[other].end
            ),
            default=self.problem.num_micro_batches,
        )
        needed: Number = 0
        for other in own:
            lane = lanes[other]
            later = self.next_f[other] + (other == number) - max(self.next_i[other], oldest + 1)
            needed += (max(0, later) + lane.runs(oldest)) * lane.activation
        return needed <= self.problem.bound

    def run(self, rank: int, option: Option) -> list[int]:
        """Run an option of `rank`. Returns the other ranks that it sends something to."""
        problem, size = self.problem, self.problem.num_micro_batches
        start, time, first, second, third = option
        self.free[rank] = end = start + time
        told: list[int] = []
        if first != NONE:
            micro, lane = self.next_f[first], problem.lanes[first]
            self.next_f[first] += 1
            self.held[rank] += lane.activation
            self.ready_f[first * size + micro] = 0
            if (target := lane.above[micro]) == NONE:
                self.ready_i[first * size + micro] = end
            else:
                self.ready_f[target * size + micro] = end + problem.delay(first, target)
                told.append(problem.lanes[target].rank)
        if second != NONE:
            micro, lane = self.next_i[second], problem.lanes[second]
            self.next_i[second] += 1
            self.held[rank] += lane.w_store - lane.activation
            self.ready_i[second * size + micro] = 0
            if (target := lane.below[micro]) != NONE:
                self.ready_i[target * size + micro] = end + problem.delay(second, target)
                told.append(problem.lanes[target].rank)
        if third != NONE:
            self.next_w[third] += 1
            self.held[rank] -= problem.lanes[third].w_store
        self.trace = (self.trace, rank, option)
        return [other for other in told if other != rank]

    @property
    def makespan(self) -> Number:
        """The end of what ran last."""
        return max(self.free)

    def rows(self) -> tuple[tuple[Slot, ...], ...]:
        """What has run, as the rows of a table."""
        steps, trace = [], self.trace
        while trace is not None:
            trace, rank, option = trace
            steps.append((rank, option))
        rows: list[list[Slot]] = [[] for _ in self.free]
        counts = {kind: [lane.first for lane in self.problem.lanes] for kind in "FIW"}
        for rank, (_, _, first, second, third) in reversed(steps):
            ops = []
            for kind, number in zip("FIW", (first, second, third), strict=True):
                if number != NONE:
                    ops.append(
                        Op(Kind(kind), self.problem.lanes[number].stage, counts[kind][number])
                    )
                    counts[kind][number] += 1
            rows[rank].append(_slot(ops))
        return tuple(map(tuple, rows))


def _slot(ops: list[Op]) -> Slot:
    """A weight gradient beside its input gradient makes both a B."""
    if len(ops) < 2:
        return tuple(ops)
    *before, _, w = ops
    return (*before, Op(Kind.B, w.stage, w.micro))
