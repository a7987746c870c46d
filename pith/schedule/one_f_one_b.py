"""1F1B: a rank runs just enough forwards ahead, then alternates (arXiv:2006.09503).

Bubble (pp - 1)(F + B), as GPipe, but rank r keeps only pp - r micro-batches alive.

With pairs, the alternation becomes one slot that overlaps a forward with the backward of an earlier
micro-batch. A pair's gradient leaves only when its forward is done too, so the warm-up is one
forward deeper for each rank below, and activations double. On a single rank the pairs are
F(i+1)|B(i) over the whole model, at the cost of one layer of activations more.
"""

from pith.schedule.phases import Phase, from_phases
from pith.schedule.table import Placement, Table


def one_f_one_b(pp: int, *, num_micro_batches: int) -> Table:
    """One stage a rank, forwards and backwards in separate slots."""
    return from_phases(
        "1f1b",
        placement=Placement("loop", pp, pp),
        num_micro_batches=num_micro_batches,
        phases=lambda rank: _phases(pp - 1 - rank, num_micro_batches, steady="F0 B0"),
    )


def one_f_one_b_pair(pp: int, *, num_micro_batches: int) -> Table:
    """One stage a rank, a forward and a backward in each slot between warm-up and drain."""
    return from_phases(
        "1f1b-pair",
        placement=Placement("loop", pp, pp),
        num_micro_batches=num_micro_batches,
        phases=lambda rank: _phases(2 * (pp - 1 - rank) + 1, num_micro_batches, steady="F0|B0"),
    )


def _phases(ahead: int, num_micro_batches: int, *, steady: str) -> list[Phase]:
    """`ahead` forwards without a backward, the steady pattern, then the backwards still owed."""
    ahead = min(ahead, num_micro_batches)
    return [(ahead, "F0"), (num_micro_batches - ahead, steady), (ahead, "B0")]
