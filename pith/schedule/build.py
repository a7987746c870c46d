"""From the name of a schedule to its table."""

from difflib import get_close_matches

from pith.errors import Fault, RequestError
from pith.schedule.dualpipev import dualpipev
from pith.schedule.gpipe import gpipe
from pith.schedule.one_f_one_b import one_f_one_b, one_f_one_b_pair
from pith.schedule.table import Placement, Table
from pith.schedule.zbv import zbv

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "1f1b-pair", "zbv", "dualpipev")


def build(name: str, *, pp: int, num_micro_batches: int) -> Table:
    """The table of schedule `name` for `pp` ranks and `num_micro_batches` micro-batches.

    The same arguments give the same table on every rank. Raises RequestError for an unknown name
    or a count below 1.
    """
    _require_counts(pp=pp, num_micro_batches=num_micro_batches)
    match name:
        case "gpipe":
            return gpipe(pp, num_micro_batches=num_micro_batches)
        case "1f1b":
            return one_f_one_b(pp, num_micro_batches=num_micro_batches)
        case "1f1b-pair":
            return one_f_one_b_pair(pp, num_micro_batches=num_micro_batches)
        case "zbv":
            return zbv(pp, num_micro_batches=num_micro_batches)
        case "dualpipev":
            return dualpipev(pp, num_micro_batches=num_micro_batches)
        case _:
            raise _unknown(name)


def placement(name: str, *, pp: int) -> Placement:
    """Which rank owns which stage under schedule `name`. Raises as `build` does."""
    return build(name, pp=pp, num_micro_batches=1).placement


def num_stages(name: str, *, pp: int) -> int:
    """How many stages schedule `name` cuts the model into. Raises as `build` does."""
    return placement(name, pp=pp).num_stages


def _require_counts(**counts: int) -> None:
    faults = tuple(
        Fault(f"schedule {name}", found=str(count), wanted="at least 1", nearest=("1",))
        for name, count in counts.items()
        if count < 1
    )
    if faults:
        raise RequestError(
            "schedule.counts",
            what="a schedule needs at least one rank and one micro-batch",
            found=", ".join(f"{name} {count}" for name, count in counts.items()),
            wanted="both at least 1",
            where="schedule",
            faults=faults,
        )


def _unknown(name: str) -> RequestError:
    nearest = tuple(get_close_matches(name.lower(), SCHEDULES, n=2, cutoff=0.3)) or SCHEDULES
    wanted = f"one of {', '.join(SCHEDULES)}"
    return RequestError(
        "schedule.unknown",
        what="no schedule has this name",
        found=repr(name),
        wanted=wanted,
        where="schedule",
        next_step=f"use {' or '.join(nearest)}",
        faults=(Fault("schedule", found=repr(name), wanted=wanted, nearest=nearest),),
    )
