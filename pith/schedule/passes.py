"""Passes: a valid table in, a valid table out."""

from collections.abc import Callable
from dataclasses import replace

from pith.schedule.table import Kind, Op, Table


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
