"""Verification: what must hold for a table to run, end, and add gradients up in one order.

operations     every (stage, micro-batch) has one F, and one B or one I
weights        every I has its one W, and only an I has one
placement      every operation is on the rank that owns its stage
pairs          a slot is one operation, or an F and a B of different micro-batch or stage
order          F before B or I, I before W
accumulation   per stage, forwards, input gradients and weight gradients in micro-batch order, so
               that float32 sums have the same bits in every schedule
live           activations held stay within the stated bound
channels       every channel posts receives for the messages it carries, in the order they are sent
progress       no rank waits for ever
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from pith.errors import Fault, RunFailedError
from pith.schedule.lower import Message, Step, lower
from pith.schedule.simulate import UNIT, live, play
from pith.schedule.table import Kind, Op, Table, slot_text

INVARIANTS: tuple[str, ...] = (
    "operations",
    "weights",
    "placement",
    "pairs",
    "order",
    "accumulation",
    "live",
    "channels",
    "progress",
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: where, what was found, what was wanted."""

    invariant: str
    rank: int
    slot: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.invariant}: rank {self.rank}, {self.slot}: {self.found}, not {self.wanted}"


def verify(
    table: Table, *, max_live: int | None = None, forward_only: bool = False
) -> tuple[Violation, ...]:
    """Every violation of `table`; none for a table that may be run.

    `max_live` bounds the activations a rank holds, in stages of one micro-batch; None is no bound.
    `forward_only` wants a table without backwards, which holds no activations.
    """
    if len(table.rows) != table.placement.pp:
        found, wanted = f"{len(table.rows)} rows", f"{table.placement.pp} rows"
        return (Violation("placement", len(table.rows), "the table", found, wanted),)
    bound = None if forward_only else max_live
    return (
        *_operations(table, forward_only=forward_only),
        *_placement(table),
        *_pairs(table),
        *_order(table),
        *_accumulation(table),
        *(_live(table, bound) if bound is not None else ()),
        *verify_steps(table, tuple(lower(table, rank) for rank in range(table.placement.pp))),
    )


def check(table: Table, *, max_live: int | None = None, forward_only: bool = False) -> None:
    """Raise RunFailedError, with one fault per violation, unless `table` may be run."""
    violations = verify(table, max_live=max_live, forward_only=forward_only)
    if violations:
        raise RunFailedError(
            "schedule.invalid",
            what=f"the table breaks {len(violations)} rule(s)",
            found=str(violations[0]),
            wanted="none broken",
            where=f"schedule {table.name}",
            faults=tuple(
                Fault(f"{v.invariant}, rank {v.rank}, {v.slot}", found=v.found, wanted=v.wanted)
                for v in violations
            ),
        )


def verify_steps(table: Table, steps: tuple[tuple[Step, ...], ...]) -> tuple[Violation, ...]:
    """The violations of lowered rows: their channels, and whether they end when played."""
    return (*_channels(steps), *_progress(table, steps))


def _located(table: Table) -> list[tuple[int, int, Op]]:
    """Every operation with its rank and the position of its slot."""
    return [
        (rank, position, op)
        for rank, row in enumerate(table.rows)
        for position, slot in enumerate(row)
        for op in slot
    ]


def _operations(table: Table, *, forward_only: bool) -> list[Violation]:
    place = table.placement
    kinds: dict[tuple[int, int], str] = {
        (stage, micro): ""
        for stage in range(place.num_stages)
        for micro in range(table.num_micro_batches)
    }
    violations = []
    for rank, _, op in _located(table):
        if (op.stage, op.micro) not in kinds:
            wanted = f"stage below {place.num_stages}, micro-batch below {table.num_micro_batches}"
            violations.append(Violation("operations", rank, str(op), "outside the model", wanted))
        else:
            kinds[op.stage, op.micro] += op.kind
    for (stage, micro), letters in kinds.items():
        found = " ".join(sorted(letters)) or "nothing"
        wanted, right = ("F", ("F",)) if forward_only else ("F B or F I W", ("B F", "F I W"))
        if found not in right:
            others = "".join(sorted(letters.replace("W", "")))
            invariant = "weights" if others in ("BF", "FI") and not forward_only else "operations"
            rank, cell = place.rank(stage, micro), f"stage {stage} micro-batch {micro}"
            violations.append(Violation(invariant, rank, cell, found, wanted))
    return violations


def _placement(table: Table) -> list[Violation]:
    return [
        Violation("placement", rank, str(op), f"on rank {rank}", f"rank {owner}")
        for rank, _, op in _located(table)
        if (owner := table.placement.rank(op.stage, op.micro)) != rank
    ]


def _pairs(table: Table) -> list[Violation]:
    wanted = "one operation, or F|B of different micro-batch or stage"
    return [
        Violation("pairs", rank, slot_text(slot), f"{len(slot)} operation(s)", wanted)
        for rank, row in enumerate(table.rows)
        for slot in row
        if not _is_slot(slot)
    ]


def _is_slot(slot: tuple[Op, ...]) -> bool:
    if len(slot) != 2:
        return len(slot) == 1
    first, second = slot
    kinds_fit = (first.kind, second.kind) == (Kind.F, Kind.B)
    return kinds_fit and (first.stage, first.micro) != (second.stage, second.micro)


def _order(table: Table) -> list[Violation]:
    """What must come first on its rank: F for B and I, I for W."""
    place = {(rank, op): position for rank, position, op in _located(table)}
    violations = []
    for (rank, op), position in place.items():
        if op.kind is Kind.F:
            continue
        before = Op(Kind.I if op.kind is Kind.W else Kind.F, op.stage, op.micro)
        at = place.get((rank, before))
        if at is not None and at >= position:
            found = f"slot {position}, {before} in slot {at}"
            violations.append(Violation("order", rank, str(op), found, f"after {before}"))
    return violations


def _accumulation(table: Table) -> list[Violation]:
    last: dict[tuple[int, int, str], Op] = {}
    violations = []
    for rank, _, op in _located(table):
        for role in _roles(op.kind):
            earlier = last.get((rank, op.stage, role))
            if earlier and earlier.micro > op.micro:
                wanted = f"{role}s of stage {op.stage} in micro-batch order"
                found = f"after {earlier}"
                violations.append(Violation("accumulation", rank, str(op), found, wanted))
            last[rank, op.stage, role] = op
    return violations


def _roles(kind: Kind) -> tuple[str, ...]:
    match kind:
        case Kind.F:
            return ("forward",)
        case Kind.I:
            return ("input gradient",)
        case Kind.W:
            return ("weight gradient",)
        case Kind.B:
            return ("input gradient", "weight gradient")


def _live(table: Table, max_live: int) -> list[Violation]:
    """The first slot of each rank that holds too much."""
    violations = []
    for rank, row in enumerate(table.rows):
        over = [
            (slot, count) for slot, count in zip(row, live(row), strict=True) if count > max_live
        ]
        if over:
            slot, count = over[0]
            found, wanted = f"{count} stage activations", f"at most {max_live}"
            violations.append(Violation("live", rank, slot_text(slot), found, wanted))
    return violations


def _channels(steps: tuple[tuple[Step, ...], ...]) -> list[Violation]:
    """The first place on each channel where posted receives and sends differ."""
    sent: dict[tuple[int, int], list[tuple[Message, str]]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for row in steps:
        for step in row:
            for message in step.sends:
                sent[message.source, message.target].append((message, slot_text(step.slot)))
            for message in step.post:
                posted[message.source, message.target].append(message)
    violations = []
    for channel in sorted(sent.keys() | posted.keys()):
        for leaving, receive in zip_longest(sent[channel], posted[channel]):
            expected = leaving[0] if leaving else None
            slot = leaving[1] if leaving else "end of row"
            if expected != receive:
                found = f"a receive for {receive or 'nothing'}"
                wanted = f"{expected or 'nothing'}, which is sent"
                violations.append(Violation("channels", channel[0], slot, found, wanted))
                break
    return violations


def _progress(table: Table, steps: tuple[tuple[Step, ...], ...]) -> list[Violation]:
    return [
        Violation("progress", rank, slot_text(slot), f"waits for {missing}", "a start")
        for rank, (slot, missing) in play(table, steps, costs=UNIT).blocked.items()
    ]
