"""The shortest schedule that there is: A* over all rows that ranks could run. Shares no code.

The rules. A rank runs one thing at a time, in an order that it chooses, each as soon as the rank
is free and the inputs are there. F of a stage needs F of the stage before; I needs F of its stage
and I of the next; W needs I. What another rank sends is `comm` under way. Every stage takes
micro-batches in ascending order, in F, in I and in W. F|B is one piece of work in which I and W
end together; it takes `pair` times the sum. Before and while something runs, its rank holds no
more than `bound`. B alone is left out: I followed by W is never worse.

Why it is exact. Of the ranks that do not wait, the one that is free first either runs something
whose inputs have been sent, or waits until something more is sent to it, and then runs that. Every
set of rows that can end comes about so, and only once. Of two states with equal counts of what has
run, and equal ranks waiting, the one in which all times are no later can do all that the other can.
States are served in the order of a time before which none of their schedules can end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf, lcm
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Problem:
    """`ranks` owns the stages; all other tuples are by stage too."""

    ranks: tuple[int, ...]
    num_micro_batches: int
    f: tuple[Fraction, ...]
    i: tuple[Fraction, ...]
    w: tuple[Fraction, ...]
    comm: tuple[Fraction, ...]
    activation: tuple[Fraction, ...]
    w_store: tuple[Fraction, ...]
    layers: tuple[int, ...]
    pair: Fraction
    bound: Fraction


class State(NamedTuple):
    """How many F, I and W each stage has run; when each rank is free, and which ranks wait.

    `sent_f` and `sent_i` are by stage the arrivals from other ranks that are still to be used.
    """

    f: tuple[int, ...]
    i: tuple[int, ...]
    w: tuple[int, ...]
    free: tuple[int, ...]
    sent_f: tuple[tuple[int, ...], ...]
    sent_i: tuple[tuple[int, ...], ...]
    waits: tuple[bool, ...]


class Move(NamedTuple):
    """The stages whose F, I and W a rank runs at once; None for none. All three are a pair."""

    f: int | None = None
    i: int | None = None
    w: int | None = None


def shortest(problem: Problem) -> Fraction | None:
    """The least makespan; None where no schedule keeps within the bound."""
    search = Search(problem)
    turn = count()
    queue = [(search.least(search.start), 0, next(turn), search.start)]
    seen: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    while queue:
        least, _, _, state = heappop(queue)
        if all(num == problem.num_micro_batches for num in state.w):
            return Fraction(max(state.free), search.scale)
        times = (*state.free, *(t for sent in (*state.sent_f, *state.sent_i) for t in sent))
        others = seen.setdefault((state.f, state.i, state.w, state.waits), [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            continue
        others.append(times)
        for after in search.next(state):
            num_run = sum(after.f) + sum(after.i) + sum(after.w)
            bound = max(least, search.least(after))
            if bound < inf:
                heappush(queue, (bound, -num_run, next(turn), after))
    return None


class Search:
    """A problem in whole numbers of 1 / `scale`."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.size, self.ranks = problem, problem.num_micro_batches, problem.ranks
        self.stages, last = range(len(self.ranks)), len(self.ranks) - 1
        self.owned = [
            [stage for stage in self.stages if self.ranks[stage] == rank]
            for rank in range(max(self.ranks) + 1)
        ]
        pairs = {
            (a, b): problem.pair * (problem.f[a] + problem.i[b] + problem.w[b])
            for own in self.owned
            for a in own
            for b in own
        }
        times = (*problem.f, *problem.i, *problem.w, *problem.comm, *pairs.values())
        self.scale = lcm(*(time.denominator for time in times))
        self.f, self.i, self.w, comm = (
            [int(time * self.scale) for time in kind]
            for kind in (problem.f, problem.i, problem.w, problem.comm)
        )
        self.pair = {key: int(time * self.scale) for key, time in pairs.items()}
        away = [a != b for a, b in pairwise(self.ranks)]
        self.up = [comm[s] if s < last and away[s] else None for s in self.stages]
        self.down = [comm[s] if s and away[s - 1] else None for s in self.stages]
        self._prepare()

    @property
    def start(self) -> State:
        none = (0,) * len(self.ranks)
        empty: tuple[tuple[int, ...], ...] = ((),) * len(self.ranks)
        num_ranks = len(self.owned)
        return State(none, none, none, (0,) * num_ranks, empty, empty, (False,) * num_ranks)

    def next(self, state: State) -> Iterator[State]:
        """All ways to go on."""
        able = [
            (state.free[rank], rank)
            for rank, own in enumerate(self.owned)
            if not state.waits[rank] and any(state.w[stage] < self.size for stage in own)
        ]
        if not able:
            return
        _, rank = min(able)
        for move in self._moves(state, rank):
            yield self._after(state, rank, move)
        if len(able) > 1:
            yield state._replace(waits=_put(state.waits, rank, True))

    def _moves(self, state: State, rank: int) -> Iterator[Move]:
        """What the rank can run next: its inputs have been sent, and there is room."""
        whole, kept, own = self.problem.activation, self.problem.w_store, self.owned[rank]
        room = self.problem.bound - sum(
            whole[s] * (state.f[s] - state.i[s]) + kept[s] * (state.i[s] - state.w[s]) for s in own
        )
        forwards = [s for s in own if self._is_sent_f(state, s)]
        backwards = [s for s in own if self._is_sent_i(state, s)]
        yield from (Move(f=s) for s in forwards if whole[s] <= room)
        yield from (Move(i=s) for s in backwards if kept[s] - whole[s] <= room)
        yield from (Move(w=s) for s in own if state.w[s] < state.i[s])
        if self.problem.pair < 1:
            for a in forwards:
                for b in backwards:
                    if state.w[b] == state.i[b] and self._most_added(a, b) <= room:
                        yield Move(a, b, b)

    def _most_added(self, a: int, b: int) -> Fraction:
        """In a pair F of a layer follows B of a layer, until either has no more."""
        whole, layers = self.problem.activation, self.problem.layers
        turns = range(1, max(layers[a], layers[b]) + 1)
        parts = [
            (Fraction(min(t, layers[a]), layers[a]), Fraction(min(t, layers[b]), layers[b]))
            for t in turns
        ]
        return max(whole[a] * forward - whole[b] * backward for forward, backward in parts)

    def _is_sent_f(self, state: State, s: int) -> bool:
        return state.f[s] < (state.f[s - 1] if s else self.size)

    def _is_sent_i(self, state: State, s: int) -> bool:
        return state.i[s] < (state.i[s + 1] if s + 1 < len(self.ranks) else state.f[s])

    def _after(self, state: State, rank: int, move: Move) -> State:
        """Run the move as soon as can be; who gets something waits no more."""
        sent_f, sent_i, waits = list(state.sent_f), list(state.sent_i), state.waits
        start = state.free[rank]
        for stage, sent in ((move.f, sent_f), (move.i, sent_i)):
            if stage is not None and sent[stage]:
                start, sent[stage] = max(start, sent[stage][0]), sent[stage][1:]
        end = start + self._time(move)
        for stage, sent, delays, step in (
            (move.f, sent_f, self.up, 1),
            (move.i, sent_i, self.down, -1),
        ):
            if stage is not None and (delay := delays[stage]) is not None:
                sent[stage + step] += (end + delay,)
                waits = _put(waits, self.ranks[stage + step], False)
        free = _put(state.free, rank, end)
        # An arrival before its rank is free is as good as one just then.
        late_f, late_i = (
            tuple(
                tuple(max(time, free[owner]) for time in times)
                for owner, times in zip(self.ranks, sent, strict=True)
            )
            for sent in (sent_f, sent_i)
        )
        f, i, w = (
            counts if stage is None else _put(counts, stage, counts[stage] + 1)
            for counts, stage in zip((state.f, state.i, state.w), move, strict=True)
        )
        return State(f, i, w, free, late_f, late_i, waits)

    def _time(self, move: Move) -> int:
        if move.f is not None and move.i is not None:
            return self.pair[move.f, move.i]
        if move.f is not None:
            return self.f[move.f]
        return self.i[move.i] if move.i is not None else self.w[move.w or 0]

    def _prepare(self) -> None:
        """The least that anything takes, pairs included, and what they save at most."""
        own = [self.owned[rank] for rank in self.ranks]
        f, i, w, pair, stages = self.f, self.i, self.w, self.pair, self.stages
        self.quick_f = [min(f[s], *(pair[s, b] for b in own[s])) for s in stages]
        self.quick_i = [min(i[s], *(pair[a, s] for a in own[s])) for s in stages]
        alone = [min(i[s] + w[s], *(pair[a, s] for a in own[s])) for s in stages]
        self.way = [*((s, True) for s in stages), *((s, False) for s in reversed(stages))]
        # From the start of I and of F of a stage until the micro-batch is through.
        self.from_i: list[int] = []
        for s in stages:
            down = (self.down[s] or 0) + self.from_i[-1] if s else 0
            self.from_i.append(max(alone[s], self.quick_i[s] + down))
        self.from_f = [self.quick_f[-1] + self.from_i[-1]]
        for s in reversed(stages[:-1]):
            self.from_f.insert(0, self.quick_f[s] + (self.up[s] or 0) + self.from_f[0])
        self.saved = [
            max(0, *(f[a] + i[b] + w[b] - pair[a, b] for a in o for b in o)) for o in self.owned
        ]
        self.saved_fi = [
            max(0, *(f[a] + i[b] - pair[a, b] for a in o for b in o)) for o in self.owned
        ]

    def least(self, state: State) -> float:
        """No schedule that begins so ends before: by the way of each micro-batch, and by the work
        of each rank. Infinity where a rank waits for nothing: it runs what is not sent yet."""
        begins: list[float] = [inf] * len(self.owned)
        longest: float = max(state.free)
        came: float = 0
        for s, forward in self.way:
            done = state.f[s] if forward else state.i[s]
            if done < self.size:
                sent = self._is_sent_f(state, s) if forward else self._is_sent_i(state, s)
                arrivals = state.sent_f[s] if forward else state.sent_i[s]
                quick = self.quick_f[s] if forward else self.quick_i[s]
                rest = self.from_f[s] if forward else self.from_i[s]
                rank = self.ranks[s]
                ready = came if not sent else arrivals[0] if arrivals else 0
                begin = max(state.free[rank], ready)
                if not (sent and state.waits[rank]):
                    begins[rank] = min(begins[rank], begin)
                longest = max(longest, begin + (self.size - done - 1) * quick + rest)
                came = begin + quick + ((self.up[s] if forward else self.down[s]) or 0)
        return max(longest, *(self._work(state, rank, begin) for rank, begin in enumerate(begins)))

    def _work(self, state: State, rank: int, begin: float) -> float:
        own, waits = self.owned[rank], state.waits[rank]
        left = [
            (self.size - state.f[s], self.size - state.i[s], self.size - state.w[s]) for s in own
        ]
        if not any(map(any, left)):
            return state.free[rank]
        if not waits and any(state.w[s] < state.i[s] for s in own):
            begin = state.free[rank]
        fi = sum(f * self.f[s] + i * self.i[s] for s, (f, i, _) in zip(own, left, strict=True))
        w = sum(num * self.w[s] for s, (_, _, num) in zip(own, left, strict=True))
        pairs = min(sum(f for f, _, _ in left), sum(i for _, i, _ in left))
        # Behind the last I of the rank, the micro-batch goes on to the stages below.
        rest = [
            (self.down[s] or 0) + self.from_i[s - 1] if s else 0
            for s, (_, i, _) in zip(own, left, strict=True)
            if i
        ]
        through = begin + fi - pairs * self.saved_fi[rank] + min(rest) if rest else begin
        return max(through, begin + fi + w - pairs * self.saved[rank])


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])
