"""DualPipeV: two stages a rank in a V, each forward overlapped with a backward of the other stage.

The order is DeepSeek's (github.com/deepseek-ai/DualPipe). Bubble (pp - 1)(F&B + B - 3W), where F&B
is the time of a pair; activations of 2 pp stages a rank, one more on the last.
"""

from pith.schedule.phases import Phase, from_v_phases
from pith.schedule.table import Table


def dualpipev(pp: int, *, num_micro_batches: int) -> Table:
    """Two stages a rank; any number of micro-batches."""
    return from_v_phases(
        "dualpipev",
        pp=pp,
        num_micro_batches=num_micro_batches,
        phases=lambda rank, num_built: _phases(pp, rank, num_built),
    )


def _phases(pp: int, rank: int, num_micro_batches: int) -> list[Phase]:
    below = pp - 1 - rank
    num_steady = num_micro_batches - 2 * pp + rank + 1
    # The last rank has nothing to overlap yet: alone, its first backward leaves sooner.
    num_alone = min(num_steady, 1) if below == 0 else 0
    return [
        (2 * below, "F0"),
        (rank + 1, "F0 F1"),
        (below, "I1 W1 F1"),
        (num_alone, "F0 B1 F1|B0"),
        (num_steady - num_alone, "F0|B1 F1|B0"),
        (below, "B1 F1|B0"),
        (1, _drain(rank + 1)),
        (below, "W I0"),
        (rank + 1, "W"),
    ]


def _drain(num_each: int) -> str:
    """`num_each` full backwards, then as many that keep W for later, on alternating stages."""
    kinds = ["B"] * num_each + ["I"] * num_each
    return " ".join(f"{kind}{(position + 1) % 2}" for position, kind in enumerate(kinds))
