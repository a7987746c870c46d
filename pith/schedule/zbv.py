"""ZB-V: two stages a rank in a V, weight gradients split off to fill gaps (arXiv:2401.10241, 6).

With F = I = W no rank idles between its first slot and its last. Activations: at most two stages of
pp micro-batches a rank, as much as the first rank of 1F1B holds.
"""

from pith.schedule.phases import Phase, from_v_phases
from pith.schedule.table import Table


def zbv(pp: int, *, num_micro_batches: int) -> Table:
    """Two stages a rank; any number of micro-batches."""
    return from_v_phases(
        "zbv",
        pp=pp,
        num_micro_batches=num_micro_batches,
        phases=lambda rank, num_built: _phases(pp, rank, num_built),
    )


def _phases(pp: int, rank: int, num_micro_batches: int) -> list[Phase]:
    below = pp - 1 - rank
    return [
        (2 * below + 1, "F0"),
        (rank, "F1 F0"),
        (below + 1, "F1 I1 W1"),
        (num_micro_batches - 2 * pp + 1 + rank, "F0 I0 W0 F1 I1 W1"),
        (below, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),  # gradients first: the ranks above wait for them
        (below + 1, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
