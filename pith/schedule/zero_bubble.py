"""ZB-H1: 1F1B with the weight gradients split off, to fill its drain (arXiv:2401.10241, 3.1).

Bubble (pp - 1)(F + B - 2W). Rank r puts off r weight gradients, so that every rank holds the
activations of pp micro-batches, as the first rank of 1F1B does.
"""

from pith.schedule.phases import Phase, from_phases
from pith.schedule.table import Placement, Table


def zb_h1(pp: int, *, num_micro_batches: int) -> Table:
    """One stage a rank; any number of micro-batches."""
    return from_phases(
        "zb-h1",
        placement=Placement("loop", pp, pp),
        num_micro_batches=num_micro_batches,
        phases=lambda rank: _phases(pp - 1 - rank, rank, num_micro_batches),
    )


def _phases(ahead: int, put_off: int, num_micro_batches: int) -> list[Phase]:
    """`ahead` forwards, then each backward with its forward; a weight gradient `put_off` later."""
    ahead, put_off = min(ahead, num_micro_batches), min(put_off, num_micro_batches)
    turns = [
        "F0 " * (turn < num_micro_batches - ahead) + "I0" + " W0" * (turn >= put_off)
        for turn in range(num_micro_batches)
    ]
    return [(ahead, "F0"), (1, " ".join(turns)), (put_off, "W0")]
