"""A row written as phases: each phase repeats a short pattern of cells.

A cell names a kind and a position among the rank's own stages: F0 is the forward of its first
stage, F1|B0 a pair. Micro-batches are not written down: every forward, and every backward (B or I),
takes the next micro-batch of its stage. W1 finishes the oldest input gradient of stage position 1
that still owes its weight gradient; a bare W the oldest of them all.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from pith.schedule.passes import take_micro_batches
from pith.schedule.table import Kind, Op, Placement, Slot, Table

Phase = tuple[int, str]  # how often, pattern


def from_phases(
    name: str,
    *,
    placement: Placement,
    num_micro_batches: int,
    phases: Callable[[int], Iterable[Phase]],
) -> Table:
    """The table whose row for each rank is spelled by `phases(rank)`."""
    rows = tuple(count_off(placement.stages(r), phases=phases(r)) for r in range(placement.pp))
    return Table(name, placement, num_micro_batches, rows)


def from_v_phases(
    name: str,
    *,
    pp: int,
    num_micro_batches: int,
    phases: Callable[[int, int], Iterable[Phase]],
) -> Table:
    """A table on the V, where rank r owns stages r and 2 pp - 1 - r.

    `phases(rank, m)` needs m of at least 2 pp - 1; a shorter step is cut from one of 2 pp - 1.
    """
    num_built = max(num_micro_batches, 2 * pp - 1)
    table = from_phases(
        name,
        placement=Placement("v", pp, 2 * pp),
        num_micro_batches=num_built,
        phases=lambda rank: phases(rank, num_built),
    )
    return take_micro_batches(table, num_micro_batches)


def count_off(stages: tuple[int, ...], *, phases: Iterable[Phase]) -> tuple[Slot, ...]:
    """Spell out the row of a rank that owns `stages`."""
    seen: Counter[tuple[bool, int]] = Counter()
    owed: list[Op] = []

    def operation(cell: str) -> Op:
        kind = Kind(cell[0])
        if kind is Kind.W:
            earlier = next(op for op in owed if len(cell) == 1 or op.stage == stages[int(cell[1:])])
            owed.remove(earlier)
            return Op(Kind.W, earlier.stage, earlier.micro)
        stage = stages[int(cell[1:])]
        count = (kind is Kind.F, stage)
        op = Op(kind, stage, seen[count])
        seen[count] += 1
        if kind is Kind.I:
            owed.append(op)
        return op

    return tuple(
        tuple(operation(cell) for cell in slot.split("|"))
        for times, pattern in phases
        for _ in range(times)
        for slot in pattern.split()
    )
