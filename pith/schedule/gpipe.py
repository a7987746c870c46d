"""GPipe: all forwards, then all backwards (arXiv:1811.06965).

The backwards run in the order of the forwards, so gradients add up as in every other schedule.
Bubble (pp - 1)(F + B); every micro-batch is alive at once.
"""

from pith.schedule.phases import from_phases
from pith.schedule.table import Placement, Table


def gpipe(pp: int, *, num_micro_batches: int) -> Table:
    """One stage a rank."""
    return from_phases(
        "gpipe",
        placement=Placement("loop", pp, pp),
        num_micro_batches=num_micro_batches,
        phases=lambda rank: [(num_micro_batches, "F0"), (num_micro_batches, "B0")],
    )
