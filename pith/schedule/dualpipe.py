"""DualPipe: DualPipeV unfolded, with micro-batches from both ends (arXiv:2412.19437).

Where DualPipeV sends a micro-batch down pp / 2 ranks and back up, DualPipe sends it through pp
ranks, while a micro-batch of the other half comes the opposite way. Each rank does at every moment
what its mirror image does, so both take the same time: the bubble is (pp / 2 - 1)(F&B + B - 3W).
Every rank holds two stages of parameters, each of which its mirror image holds too.
"""

from pith.schedule.dualpipev import dualpipev
from pith.schedule.table import Op, Placement, Slot, Table


def dualpipe(pp: int, *, num_micro_batches: int) -> Table:
    """Even `pp`, any even number of micro-batches. For simulation only."""
    half = num_micro_batches // 2
    folded = dualpipev(pp // 2, num_micro_batches=half)
    rows = (*folded.rows, *reversed(folded.rows))
    return Table(
        "dualpipe",
        Placement("bidirectional", pp, pp, num_micro_batches),
        num_micro_batches,
        tuple(
            tuple(_unfolded(slot, rank=rank, half=half) for slot in row)
            for rank, row in enumerate(rows)
        ),
    )


def _unfolded(slot: Slot, *, rank: int, half: int) -> Slot:
    """On the way down stage s is on rank s; all other work is for the other half."""
    return tuple(Op(op.kind, op.stage, op.micro + half * (op.stage != rank)) for op in slot)
