"""`auto`: the schedule that ends first at the costs of a model, within a bound on activations.

Every schedule that the engine executes is built and timed, with one stage a rank or with two: more
of them mean more messages, which the costs of layers do not show. All ranks choose alike: nothing
that is measured on one of them enters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from pith.errors import Fault, RequestError
from pith.schedule.build import SCHEDULES, build, placement, varies
from pith.schedule.costs import Costs, Number
from pith.schedule.list_scheduler import least_live, usual_live
from pith.schedule.measure import measure
from pith.schedule.partial import SLACK
from pith.schedule.simulate import Simulation, simulate
from pith.schedule.table import Placement, Table
from pith.schedule.timeline import number

# The costs of one model on any placement, so that makespans on several compare.
CostsOf = Callable[[Placement], Costs]

# Of those that end at the same time the first is taken, so that parameters stay on the V.
_FIRST = ("zbv", "dualpipev", "list")
_ON_ONE_RANK = "1f1b-pair"  # folding buys nothing there


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule at the costs of the model: when it ends, and what the fullest rank holds.

    Where it could not be built, `fault` says why and the numbers are None.
    """

    name: str
    num_stages: int
    makespan: Number | None
    peak_live: Number | None
    fits: bool
    fault: str = ""

    def __str__(self) -> str:
        head = f"{self.name:<12} {self.num_stages:>3} stages"
        if self.makespan is None or self.peak_live is None:
            return f"{head}  {self.fault}"
        times = f"time {number(self.makespan):>8}  holds {number(self.peak_live):>6}"
        return f"{head}  {times}{'' if self.fits else ', too much'}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen schedule in simulated time, the bound, and all that there was to choose from."""

    simulation: Simulation
    max_live: Number
    candidates: tuple[Candidate, ...]

    @property
    def table(self) -> Table:
        return self.simulation.table

    @property
    def costs(self) -> Costs:
        return self.simulation.costs

    def lines(self) -> Iterator[str]:
        """The candidates in words, those that fit before the others, the fastest first."""
        yield f"auto: the first to end of those that hold at most {number(self.max_live)}"
        yield from (f"  {each}" for each in sorted(self.candidates, key=_worth))


@dataclass(frozen=True, slots=True)
class _Built:
    table: Table
    costs: Costs
    makespan: Number
    peak_live: Number


_Key = tuple[str, Placement]
_Found = dict[_Key, _Built | RequestError]  # or why it could not be built


def auto(
    pp: int,
    *,
    num_micro_batches: int,
    costs: CostsOf,
    max_live: Number | None = None,
    num_stages: int | None = None,
    most_stages: int | None = None,
) -> Choice:
    """Choose among all schedules, those of `num_stages` or of at most `most_stages` where given.

    `max_live` bounds the activations of every rank, in units of the costs; None is as much as
    dualpipev holds, or on one rank 1f1b-pair. Raises RequestError where nothing fits, and as
    `build` does where nothing can be built.
    """

    def built(key: _Key, bound: Number | None = None) -> _Built | RequestError:
        name, place = key
        virtual = place.num_stages // pp if varies(name) else None
        try:
            cut = costs(place)
            cut.require(place.num_stages)
            table = build(
                name,
                pp=pp,
                num_micro_batches=num_micro_batches,
                virtual=virtual,
                costs=cut,
                max_live=bound,
            )
        except RequestError as error:
            return error
        return _Built(table, cut, *measure(table, cut))

    keys = _asked_for(pp, num_stages=num_stages, most_stages=most_stages)
    found = {key: built(key) for key in keys if key[0] != "list"}
    bound = _usual(pp, found) if max_live is None else max_live
    found = {key: found.get(key) or built(key, bound) for key in keys}
    fitting = [
        each
        for each in found.values()
        if isinstance(each, _Built) and each.peak_live <= bound * SLACK
    ]
    if not fitting:
        raise _unfit(found, costs, bound)
    soonest = min(each.makespan for each in fitting)
    chosen = next(each for each in fitting if each.makespan <= soonest * SLACK)
    candidates = tuple(_candidate(key, each, fitting) for key, each in found.items())
    return Choice(simulate(chosen.table, chosen.costs), bound, candidates)


def _asked_for(pp: int, *, num_stages: int | None, most_stages: int | None) -> list[_Key]:
    """Names and placements, the preferred first. Raises RequestError where there is none."""
    first = (_ON_ONE_RANK, *_FIRST) if pp == 1 else _FIRST
    names = (*first, *(name for name in SCHEDULES if name not in first))
    keys = [(name, placement(name, pp=pp)) for name in names]
    keys.append(("list", placement("list", pp=pp, virtual=1)))
    asked = [
        (name, place)
        for name, place in keys
        if num_stages in (None, place.num_stages)
        and (most_stages is None or place.num_stages <= most_stages)
    ]
    if not asked:
        found = f"{num_stages or f'at most {most_stages}'} on {pp} ranks"
        fault = Fault("schedule num_stages", found, f"{pp} or {2 * pp}", (str(pp), str(2 * pp)))
        raise RequestError("schedule.request", what=str(fault), faults=(fault,))
    return asked


def _usual(pp: int, found: _Found) -> Number:
    """What dualpipev holds, or on one rank 1f1b-pair; about as much where that is not there."""
    built = {
        name: (place, each) for (name, place), each in found.items() if isinstance(each, _Built)
    }
    usual = _ON_ONE_RANK if pp == 1 else "dualpipev"
    if usual in built:
        return built[usual][1].peak_live
    return max((usual_live(place, each.costs) for place, each in built.values()), default=0)


def _candidate(key: _Key, each: _Built | RequestError, fitting: list[_Built]) -> Candidate:
    name, place = key
    if isinstance(each, RequestError):
        return Candidate(name, place.num_stages, None, None, fits=False, fault=each.what)
    fits = any(each is other for other in fitting)
    return Candidate(name, place.num_stages, each.makespan, each.peak_live, fits)


def _unfit(found: _Found, costs: CostsOf, max_live: Number) -> RequestError:
    """The least bound with which something fits; why nothing could be built where nothing was."""
    needs: list[tuple[Number, str]] = []
    for (name, place), each in found.items():
        if isinstance(each, _Built):
            needs.append((each.peak_live, name))
        elif each.code == "schedule.max_live":
            needs.append((least_live(place, costs(place)), name))
    if not needs:
        return next(each for each in found.values() if isinstance(each, RequestError))
    least, name = min(needs)
    wanted = f"{number(least)} or more: what {name} holds"
    fault = Fault("schedule max_live", number(max_live), wanted, (number(least),))
    return RequestError("schedule.max_live", what=str(fault), faults=(fault,))


def _worth(candidate: Candidate) -> tuple[bool, Number]:
    return not candidate.fits, inf if candidate.makespan is None else candidate.makespan
