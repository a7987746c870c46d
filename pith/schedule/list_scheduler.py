"""A list scheduler: fills the time of every rank with F, I, W and pairs, on any placement.

Several rules build a schedule each, and of small problems a search (pith.schedule.beam) looks for
a better one; the shortest is kept. A rule gives every F and I a time at which it is due: each
micro-batch starts a period after the one before and then goes its way without a pause. A rank runs
what is due first, of what can start soon; weight gradients fill gaps. A schedule so built may look
ahead no further than one operation (parametrized active schedules, Bierwirth and Mattfeld,
Evolutionary Computation 7(1), 1999).
"""

from dataclasses import dataclass
from math import inf

from pith.errors import Fault, RequestError
from pith.schedule.beam import search
from pith.schedule.costs import Costs, Number, at
from pith.schedule.partial import NONE, Option, Partial, Problem
from pith.schedule.simulate import UNIT
from pith.schedule.table import Placement, Table


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rank chooses.

    period     from micro-batch to micro-batch, in parts of the work of the busiest rank
    patience   how long to wait for what is due earlier, in parts of the time until something
               could have ended
    gap        how long a gap must be for W, in parts of W
    pairs      whether F and B that can run together do
    """

    period: float
    patience: float
    gap: float
    pairs: bool


# Chosen one after the other, each the one that shortened most the schedules of 3,000 problems
# of 2 to 8 ranks, by what those before it had found.
RULES = (
    Rule(0.6, 0.5, 0.5, False),
    Rule(0.3, 0.99, 0, True),
    Rule(0.8, 0.99, 1, False),
    Rule(0.3, 0.2, 0, True),
    Rule(4, 0.99, 0.5, True),
    Rule(0.2, 0.5, 0.5, True),
    Rule(0.4, 0.99, 0.5, False),
    Rule(0.8, 0.2, 0.5, True),
    Rule(0.5, 0.99, 0, False),
    Rule(0.4, 0.5, 0, True),
    Rule(1, 0.5, 1, False),
    Rule(0.1, 0.99, 0, True),
    Rule(0.5, 0, 0.5, True),
    Rule(0.2, 0.99, 0, True),
    Rule(0.3, 0.99, 0.5, False),
    Rule(0.5, 0.5, 1, True),
)
_RULED = 6144  # operations that rules may schedule in all: about 30 ms
_SEARCHED = 6144  # operations by width of the search: up to 100 ms
_WIDTHS = range(40, 128)  # where less could be kept, the search finds hardly anything

# Two ranks and four micro-batches: so wide, hardly anything promising is dropped. Pairs at uneven
# costs need that to come within 3 % of the best.
_TINY, _TINY_WIDTH = 48, 384


def list_schedule(
    placement: Placement,
    *,
    num_micro_batches: int,
    costs: Costs = UNIT,
    max_live: Number | None = None,
) -> Table:
    """The shortest schedule found in which no rank holds more than `max_live` activations.

    `max_live` is counted as in simulate.live with these costs, by default `usual_live`. The same
    arguments give the same table on every rank. Raises RequestError where one micro-batch does not
    fit, or `costs` are of another number of stages.
    """
    costs.require(placement.num_stages)
    assert num_micro_batches >= 1
    assert placement.style != "bidirectional" or placement.num_micro_batches == num_micro_batches
    bound = usual_live(placement, costs) if max_live is None else max_live
    problem = Problem.of(
        placement, num_micro_batches=num_micro_batches, costs=costs, max_live=bound
    )
    if (least := least_live(placement, costs)) > problem.bound:
        wanted = f"{least} or more: what a rank holds of one micro-batch"
        fault = Fault("schedule max_live", str(max_live), wanted, (str(least),))
        raise RequestError("schedule.max_live", what=str(fault), faults=(fault,))
    rows = _shortest(problem, pairs=costs.pair < 1).rows()
    return Table("list", placement, num_micro_batches, rows)


def usual_live(placement: Placement, costs: Costs) -> Number:
    """Activations of pp + 1/2 micro-batches on the fullest rank: about what dualpipev holds."""
    return (2 * placement.pp + 1) * least_live(placement, costs) / 2


def least_live(placement: Placement, costs: Costs) -> Number:
    """What the fullest rank holds of one micro-batch: no schedule can do with less."""
    stages = range(placement.num_stages)
    return max(
        sum(at(costs.activation, s) for s in stages if placement.rank(s, micro) == rank)
        for rank in range(placement.pp)
        for micro in (0, placement.num_micro_batches - 1)  # one of each direction
    )


def _shortest(problem: Problem, *, pairs: bool) -> Partial:
    """The shortest of all that the rules build, and what the search makes of it."""
    num_operations = 3 * problem.num_micro_batches * len(problem.lanes)
    num_rules = max(2, _RULED // num_operations)
    built = (_Builder(problem, rule, pairs=pairs).build() for rule in RULES[:num_rules])
    best = min(built, key=lambda partial: partial.makespan)
    width = min(_SEARCHED // num_operations, _WIDTHS.stop)
    if num_operations <= _TINY and pairs:
        width = _TINY_WIDTH
    if width < _WIDTHS.start or not problem.is_one_way:
        return best
    return search(problem, pairs=pairs, width=width, below=best.makespan) or best


Plan = tuple[Number, int, Option]  # when a rank could have ended something, the rank, its choice


class _Builder:
    """Builds the schedule of one rule. `due_f` and `due_i` are by lane, for micro-batch 0."""

    def __init__(self, problem: Problem, rule: Rule, *, pairs: bool) -> None:
        lanes = problem.lanes
        self.rule, self.partial = rule, Partial(problem, pairs=pairs and rule.pairs)
        work = (sum(lanes[n].f + lanes[n].i + lanes[n].w for n in own) for own in problem.of_rank)
        self.period = rule.period * max(work)
        starts_f, starts_i = _unhindered(problem)
        # The micro-batches of a second direction begin with the first.
        late = [lane.first * self.period for lane in lanes]
        self.due_f = [start - begin for start, begin in zip(starts_f, late, strict=True)]
        self.due_i = [start - begin for start, begin in zip(starts_i, late, strict=True)]

    def build(self) -> Partial:
        """Always lets the rank go on that can end something first: what could still reach it
        before then has been sent."""
        plans = [self._plan(rank) for rank in range(len(self.partial.free))]
        while plan := min(filter(None, plans), default=None):
            _, rank, option = plan
            for changed in (rank, *self.partial.run(rank, option)):
                plans[changed] = self._plan(changed)
        return self.partial

    def _plan(self, rank: int) -> Plan | None:
        """What `rank` runs next, and when something could have ended; None for nothing yet."""
        fill: list[Option] = []
        moving: list[Option] = []
        for option in self.partial.options(rank):
            (fill if option[2] == option[3] == NONE else moving).append(option)
        first = min((option[0] for option in moving), default=inf)
        if fill:
            oldest = min(fill, key=lambda option: (self.partial.next_w[option[4]], -option[4]))
            now, time = oldest[:2]
            if first > now and first >= now + self.rule.gap * time:
                return now + time, rank, oldest
        if not moving:
            return None
        soonest = min(option[0] + option[1] for option in moving)
        limit = first + self.rule.patience * (soonest - first)
        soon = (option for option in moving if option[0] <= limit)
        return soonest, rank, min(soon, key=self._due)

    def _due(self, option: Option) -> tuple[bool, Number]:
        """Pairs come first; then what is due first."""
        _, _, first, second, _ = option
        due: Number = 0
        if first != NONE:
            due += self.due_f[first] + self.partial.next_f[first] * self.period
        if second != NONE:
            due += self.due_i[second] + self.partial.next_i[second] * self.period
        return NONE in (first, second), due


def _unhindered(problem: Problem) -> tuple[list[Number], list[Number]]:
    """When F and I of each lane start for a micro-batch that never waits."""
    of_stage = {lane.stage: number for number, lane in enumerate(problem.lanes)}
    starts_f: dict[int, Number] = {}
    starts_i: dict[int, Number] = {}
    clock: Number = 0
    for stage, number in of_stage.items():
        lane, starts_f[stage] = problem.lanes[number], clock
        clock += lane.f + problem.delay(number, lane.above[lane.first])
    for stage, number in reversed(of_stage.items()):
        lane, starts_i[stage] = problem.lanes[number], clock
        clock += lane.i + problem.delay(number, lane.below[lane.first])
    lanes = problem.lanes
    return [starts_f[lane.stage] for lane in lanes], [starts_i[lane.stage] for lane in lanes]
