"""From the name of a schedule to its table."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial

from pith.errors import Fault, RequestError, first_of
from pith.schedule.chimera import chimera
from pith.schedule.costs import Costs, Number
from pith.schedule.dualpipe import dualpipe
from pith.schedule.dualpipev import dualpipev
from pith.schedule.gpipe import gpipe
from pith.schedule.interleaved import interleaved
from pith.schedule.list_scheduler import list_schedule
from pith.schedule.one_f_one_b import one_f_one_b, one_f_one_b_pair
from pith.schedule.simulate import UNIT
from pith.schedule.table import Placement, Table
from pith.schedule.zbv import zbv
from pith.schedule.zero_bubble import zb_h1

# What a run can execute, and what needs two copies of the parameters and is only simulated.
SCHEDULES: tuple[str, ...] = (
    "gpipe",
    "1f1b",
    "1f1b-pair",
    "interleaved",
    "zb-h1",
    "zbv",
    "dualpipev",
    "list",
)
SIMULATION_ONLY: tuple[str, ...] = ("dualpipe", "chimera")
_VARYING = ("interleaved", "list")  # take any number of stages a rank
_VIRTUAL = 2  # what they have when not told


def build(
    name: str,
    *,
    pp: int,
    num_micro_batches: int,
    virtual: int | None = None,
    costs: Costs | None = None,
    max_live: Number | None = None,
) -> Table:
    """The table of schedule `name` for `pp` ranks and `num_micro_batches` micro-batches.

    `virtual` is the number of stages a rank; interleaved and list take any, 2 by default. Only
    list reads `costs` (F = I = W = 1 by default) and `max_live`, its bound on the activations of a
    rank. The same arguments give the same table on every rank. Raises RequestError with all faults
    for an unknown name or a number that the schedule cannot have.
    """
    _require(name, virtual=virtual, pp=pp, num_micro_batches=num_micro_batches)
    builder: Callable[..., Table]
    match name:
        case "gpipe":
            builder = gpipe
        case "1f1b":
            builder = one_f_one_b
        case "1f1b-pair":
            builder = one_f_one_b_pair
        case "interleaved":
            builder = partial(interleaved, virtual=virtual or _VIRTUAL)
        case "zb-h1":
            builder = zb_h1
        case "zbv":
            builder = zbv
        case "dualpipev":
            builder = dualpipev
        case "dualpipe":
            builder = dualpipe
        case "list":
            place = placement(name, pp=pp, virtual=virtual)
            return list_schedule(
                place, num_micro_batches=num_micro_batches, costs=costs or UNIT, max_live=max_live
            )
        case "chimera":
            builder = chimera
        case _:
            raise AssertionError(name)
    return builder(pp, num_micro_batches=num_micro_batches)


def placement(name: str, *, pp: int, virtual: int | None = None) -> Placement:
    """Which rank owns which stage under schedule `name`. Raises as `build` does.

    A bidirectional one depends on the number of micro-batches; here it is that of two.
    """
    if name == "list":
        _require(name, virtual=virtual, pp=pp)
        return Placement("v", pp, (virtual or _VIRTUAL) * pp)
    return build(name, pp=pp, num_micro_batches=2, virtual=virtual).placement


def num_stages(name: str, *, pp: int, virtual: int | None = None) -> int:
    """How many stages schedule `name` cuts the model into. Raises as `build` does."""
    return placement(name, pp=pp, virtual=virtual).num_stages


def varies(name: str) -> bool:
    """Whether schedule `name` takes any number of stages a rank."""
    return name in _VARYING


def _require(name: str, *, virtual: int | None, **counts: int) -> None:
    """Raise RequestError with all that is wrong in a request."""
    faults = (*_names(name), *_counts(name, counts), *_stages_a_rank(name, virtual))
    if faults:
        chooser = "pith.schedule.auto chooses a schedule" if name == "auto" else ""
        raise RequestError(
            "schedule.request", what=first_of(faults), faults=faults, next_step=chooser
        )


def _names(name: str) -> Iterator[Fault]:
    names = (*SCHEDULES, *SIMULATION_ONLY)
    if name not in names:
        nearest = tuple(get_close_matches(name.lower(), names, n=2, cutoff=0.3)) or SCHEDULES
        wanted = f"one of {', '.join(names)}, or auto where one can be chosen"
        yield Fault("schedule", repr(name[:40]), wanted, nearest)


def _counts(name: str, counts: dict[str, int]) -> Iterator[Fault]:
    both_ends = name in SIMULATION_ONLY
    step, wanted = (2, f"an even number: {name} feeds both ends") if both_ends else (1, "1 or more")
    for field, count in counts.items():
        if count < 1 or count % step:
            nearest = sorted({max(step, count - 1), max(step, count + 1)})
            yield Fault(f"schedule {field}", str(count), wanted, tuple(map(str, nearest)))


def _stages_a_rank(name: str, virtual: int | None) -> Iterator[Fault]:
    if virtual is None or any(_names(name)):
        return
    if name in _VARYING:
        if virtual < 1:
            yield Fault("schedule virtual", str(virtual), "1 or more", ("1",))
    elif virtual != (has := len(placement(name, pp=2).stages(0))):
        wanted = f"{has}, what {name} has: only {' and '.join(_VARYING)} can vary it"
        yield Fault("schedule virtual", str(virtual), wanted, (str(has),))
