"""Interleaved 1F1B: several stages a rank, dealt out in turn (Megatron, arXiv:2104.04473).

Micro-batches go in rounds of pp or a few more: a rank runs a whole round through one of its stages,
then through the next. Bubble (pp - 1)(F + B) of a stage, and a stage is a `virtual`-th of what a
rank holds. Rounds as even as can be leave no short round at the end, in which ranks would wait for
each other.
"""

from pith.schedule.phases import Phase, from_phases
from pith.schedule.table import Placement, Table


def interleaved(pp: int, *, num_micro_batches: int, virtual: int) -> Table:
    """`virtual` stages a rank; any number of micro-batches."""
    sizes = _rounds(pp, num_micro_batches)
    return from_phases(
        "interleaved",
        placement=Placement("loop", pp, virtual * pp),
        num_micro_batches=num_micro_batches,
        phases=lambda rank: _phases(2 * (pp - 1 - rank), sizes=sizes, virtual=virtual),
    )


def _rounds(pp: int, num_micro_batches: int) -> list[int]:
    """The micro-batches of each round: at least pp where there are as many, larger rounds first."""
    num_rounds = max(1, num_micro_batches // pp)
    size, num_larger = divmod(num_micro_batches, num_rounds)
    return [size + (turn < num_larger) for turn in range(num_rounds)]


def _phases(ahead: int, *, sizes: list[int], virtual: int) -> list[Phase]:
    """Forwards until the first backward can be there, then one of each, then backwards.

    A rank is `ahead` forwards further than the last rank, where the first backward follows the
    first forward of the last stage.
    """
    forwards = [f"F{stage}" for size in sizes for stage in range(virtual) for _ in range(size)]
    backwards = [
        f"B{stage}" for size in sizes for stage in reversed(range(virtual)) for _ in range(size)
    ]
    ahead = min((virtual - 1) * sizes[0] + ahead, len(forwards))
    steady = zip(forwards[ahead:], backwards, strict=False)
    return [
        (1, " ".join(forwards[:ahead])),
        (1, " ".join(f"{forward} {backward}" for forward, backward in steady)),
        (1, " ".join(backwards[len(forwards) - ahead :])),
    ]
