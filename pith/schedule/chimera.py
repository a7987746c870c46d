"""Chimera: two 1F1B pipelines in opposite directions, each in the gaps of the other.

A unit is pp micro-batches, half of them each way (arXiv:2107.06925). Further units follow every
2 pp ticks, the first forwards of one between the last backwards of the one before. Bubble, in
forwards: pp - 2 where a backward takes as long as a forward; where it takes two, 2 (pp - 2) and for
each further unit pp - 2 more. Every rank holds two stages of parameters.
"""

from collections.abc import Iterator

from pith.schedule.table import Kind, Op, Placement, Table


def chimera(pp: int, *, num_micro_batches: int) -> Table:
    """Even `pp`, any even number of micro-batches. For simulation only."""
    half = num_micro_batches // 2
    rows = []
    for rank in range(pp):
        down = _ticks(pp, stage=rank, micros=range(half))
        up = _ticks(pp, stage=pp - 1 - rank, micros=range(half, num_micro_batches))
        rows.append(tuple((op,) for _, op in sorted((*down, *up))))
    place = Placement("bidirectional", pp, pp, num_micro_batches)
    return Table("chimera", place, num_micro_batches, tuple(rows))


def _ticks(pp: int, *, stage: int, micros: range) -> Iterator[tuple[int, Op]]:
    """When each operation of `stage` runs; no two of a rank share a tick, as pp is even."""
    for turn, micro in enumerate(micros):
        unit, place = divmod(turn, pp // 2)
        start = 2 * pp * unit + 2 * place
        yield start + stage, Op(Kind.F, stage, micro)
        yield start + 2 * pp - 1 - stage, Op(Kind.B, stage, micro)
