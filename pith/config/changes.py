"""What differs between the recipe of a checkpoint and the one that is to go on from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pith.errors import Fault, RequestError, shown

ABSENT = "absent"

# Another value here makes it another run; what lies below a name is fixed with it. The last two
# are no keys of a recipe that `changes` finds: whoever reads the corpus compares what is in it.
FIXED = (
    "model.fields",
    "training.seed",
    "training.sequence_length",
    "data.seed",
    "data.validation",
    "data.packing",
    "optimizer.name",
    "data.corpus",
    "data.tokenizer",
)
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs: its dotted name, what it was and what it is now, or ABSENT."""

    name: str
    before: object
    after: object


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[Change, ...]:
    """Each value in which two resolved recipes (`model_dump(mode="json")`) differ.

    Lists are compared whole. The place of the corpus is named "data.corpus (path)": a corpus may
    move, so this is no other data.corpus.
    """
    found = _differences(before, after, name="")
    return tuple(
        replace(change, name="data.corpus (path)") if change.name == "data.corpus" else change
        for change in found
    )


def refuse_fixed(
    changes: Sequence[Change], *, allowed: Sequence[str], where: str
) -> tuple[Change, ...]:
    """The changes, all of which are to be announced, if a run may go on with them.

    `allowed` names what of FIXED may change all the same, each with everything below it. `where`
    is what the run goes on from. Raises RequestError with every other fixed change and every
    allowed name that is not fixed.
    """
    fixed = [change for change in changes if _lies_below(change.name, FIXED)]
    meant = [name for name in allowed if _lies_below(name, FIXED)]
    refused = [change for change in fixed if not _lies_below(change.name, meant)]
    names = tuple(dict.fromkeys((*(change.name for change in fixed), *FIXED)))
    faults = (
        *(Fault(c.name, _shown(c.after), wanted=_shown(c.before)) for c in refused),
        *(_unknown(name, names) for name in allowed if name not in meant),
    )
    if faults:
        another = _listed([change.name for change in refused])
        raise RequestError(
            "resume.changed",
            what=f"this run cannot go on with another {another}"
            if refused
            else "a change is allowed of something that is not fixed",
            where=where,
            next_step="put them back, or --allow-change NAME for each that is meant;"
            " --resume never starts anew",
            faults=faults,
        )
    return tuple(changes)


def text(change: Change) -> str:
    """A change in a line: "optimizer.lr 0.001 -> 0.0005"."""
    return f"{change.name} {_shown(change.before)} -> {_shown(change.after)}"


class _Missing:
    """Stands for a key that only the other side has, even where a value says "absent"."""


def _differences(before: object, after: object, *, name: str) -> Iterator[Change]:
    """The changes below `name`. A table that only one side has is told by its keys."""
    sides = [{} if isinstance(side, _Missing) else side for side in (before, after)]
    old, new = sides
    if isinstance(old, Mapping) and isinstance(new, Mapping) and (old or new):
        for key in dict.fromkeys((*old, *new)):
            below = f"{name}.{key}" if name else str(key)
            yield from _differences(old.get(key, _Missing()), new.get(key, _Missing()), name=below)
    elif not _equal(before, after):
        yield Change(name, *(ABSENT if isinstance(s, _Missing) else s for s in (before, after)))


def _equal(before: object, after: object) -> bool:
    """True is not 1, for JSON; 1 is 1.0."""
    return isinstance(before, bool) == isinstance(after, bool) and before == after


def _lies_below(name: str, tops: Sequence[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def _unknown(name: str, known: Sequence[str]) -> Fault:
    nearest = get_close_matches(name, known, n=3, cutoff=0.5) or FIXED
    return Fault("--allow-change", repr(name), "something that is fixed", tuple(nearest))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    return ABSENT if value == ABSENT else shown(value)
