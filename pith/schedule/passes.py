"""Passes: a valid table in, a valid table out."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

from pith.errors import RunFailedError
from pith.schedule.costs import Costs, Number
from pith.schedule.measure import Arrivals, Facts, measure
from pith.schedule.partial import SLACK
from pith.schedule.simulate import simulate
from pith.schedule.table import Kind, Op, Slot, Table


def take_micro_batches(table: Table, num_micro_batches: int) -> Table:
    """The same table for its first `num_micro_batches` micro-batches.

    No data edge joins two micro-batches, so what is left can still run. A pair that loses one of
    its operations becomes a plain slot.
    """
    assert 1 <= num_micro_batches <= table.num_micro_batches
    kept = _keep(table, lambda op: op.micro < num_micro_batches)
    return replace(kept, num_micro_batches=num_micro_batches)


def forward_only(table: Table) -> Table:
    """Only the forwards, in the same order: an evaluation step."""
    return _keep(table, lambda op: op.kind is Kind.F)


def _keep(table: Table, wanted: Callable[[Op], bool]) -> Table:
    rows = (tuple(tuple(filter(wanted, slot)) for slot in row) for row in table.rows)
    return replace(table, rows=tuple(tuple(filter(None, row)) for row in rows))


def split_w(table: Table, *, costs: Costs, max_live: Number | None = None) -> Table:
    """Every B becomes I, and W runs later: in a gap that is long enough, at the latest at the end.

    W also runs before a forward with which its rank would hold more than `max_live`, by default the
    most that a rank of `table` holds, and before a pair whose B is of the same stage. Weight
    gradients keep their order. On 1F1B this is ZB-H1 (arXiv:2401.10241).
    """
    bound = measure(table, costs)[1] if max_live is None else max_live
    arrivals = Arrivals(table, costs)
    ranks = [_Splitter(row, costs, bound) for row in table.rows]
    while any(rank.moves(arrivals) for rank in ranks):
        pass
    return replace(table, rows=tuple(rank.ended() for rank in ranks))


class _Splitter:
    """A row while its weight gradients are placed."""

    def __init__(self, row: tuple[Slot, ...], costs: Costs, bound: Number) -> None:
        self.costs, self.bound = costs, bound * SLACK
        slots = (tuple(_split(op, len(slot)) for op in slot) for slot in row)
        self.ahead = deque(slot for slot in slots if slot[0].kind is not Kind.W)
        self.owed: deque[Op] = deque()
        self.row: list[Slot] = []
        self.clock: Number = 0
        self.held: Number = 0

    def moves(self, arrivals: Arrivals) -> bool:
        """Run all whose inputs have been sent. Whether that was anything."""
        num_before = len(self.ahead)
        while self.ahead and (start := arrivals.start(self.ahead[0], self.clock)) < inf:
            slot = self.ahead.popleft()
            while self.owed and (self._fits_before(start) or self._is_due_before(slot)):
                self._run((self.owed.popleft(),))
            self.clock = max(self.clock, start)
            self._run(slot)
            arrivals.send(slot, self.clock)
            self.owed += (Op(Kind.W, op.stage, op.micro) for op in slot if op.kind is Kind.I)
        return len(self.ahead) < num_before

    def ended(self) -> tuple[Slot, ...]:
        assert not self.ahead
        return (*self.row, *((op,) for op in self.owed))

    def _fits_before(self, start: Number) -> bool:
        return self.clock + self.costs.operation(self.owed[0]) <= start

    def _is_due_before(self, slot: Slot) -> bool:
        """Before what finds no room, and before a B of a stage that owes an earlier W."""
        if self.held + Facts.of(slot, self.costs).most > self.bound:
            return True
        *_, last = slot
        return last.kind is Kind.B and any(op.stage == last.stage for op in self.owed)

    def _run(self, slot: Slot) -> None:
        facts = Facts.of(slot, self.costs)
        self.row.append(slot)
        self.clock += facts.time
        self.held += facts.change


def _split(op: Op, num_ops: int) -> Op:
    return replace(op, kind=Kind.I) if op.kind is Kind.B and num_ops == 1 else op


def pair(table: Table, *, costs: Costs) -> Table:
    """Each F becomes an overlapped pair with a B behind it; I with its own W counts as a B.

    The table comes back as it was unless simulation says that it ends sooner with the pairs and
    that no rank holds more than the fullest rank did. A pair is one slot, its gradient leaves
    later: what was not made for pairs can end later with them.
    """
    paired = replace(table, rows=tuple(map(_with_pairs, table.rows)))
    before = simulate(table, costs)
    try:
        after = simulate(paired, costs)
    except RunFailedError:  # ranks wait for each other
        return table
    holds_more = max(after.peak_live) > max(before.peak_live) * SLACK
    return paired if after.makespan * SLACK < before.makespan and not holds_more else table


def _with_pairs(row: tuple[Slot, ...]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    at = 0
    while at < len(row):
        found = ((size, _joined(row[at : at + size])) for size in (3, 2))
        size, slot = next((each for each in found if each[1]), (1, row[at]))
        slots.append(slot)
        at += size
    return tuple(slots)


def _joined(slots: tuple[Slot, ...]) -> Slot:
    """The pair of an F and the backward behind it; empty for any other slots."""
    ops = [op for slot in slots for op in slot]
    if len(ops) != len(slots) or "".join(op.kind for op in ops) not in ("FB", "FIW"):
        return ()
    forward, backward = ((op.stage, op.micro) for op in ops[:2])
    if backward == forward or backward != (ops[-1].stage, ops[-1].micro):
        return ()
    return (ops[0], replace(ops[1], kind=Kind.B))
