"""Verification: what must hold for a table to run, end, and add gradients up in one order.

operations     every (stage, micro-batch) has one F, and B or I once
weights        every I has its one W, and only an I has one: none is left over at the end
placement      every operation is on the rank that owns its stage
pairs          a slot is one operation, or an F and a B of different micro-batch or stage
order          F before B or I, I before W
accumulation   per stage, forwards, input gradients and weight gradients in micro-batch order, so
               that float32 sums have the same bits in every schedule
live           activations held stay within the stated bound
channels       every channel posts receives for the messages it carries, in the order they are sent
progress       no rank waits for ever, with a channel for each direction of a pair of ranks
lanes          nor with one communicator for all messages of a rank, in the mirrored order
executed       what really ran is what the table says
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pith.errors import Fault, RunFailedError
from pith.schedule.costs import Costs, Number
from pith.schedule.lower import Message, Step, lower_rows
from pith.schedule.mirror import mirrored
from pith.schedule.play import Lane, Played, play
from pith.schedule.simulate import UNIT, live
from pith.schedule.table import Kind, Op, Table, parse_slot, slot_text

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
    "lanes",
    "executed",
)


SLACK = 1 + 1e-9  # sums of the same activations in another order differ in their last digits
Located = list[tuple[int, int, Op]]


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
    table: Table,
    *,
    max_live: Number | None = None,
    costs: Costs = UNIT,
    forward_only: bool = False,
) -> tuple[Violation, ...]:
    """Every violation of `table`; none for a table that may be run.

    `max_live` bounds the activations a rank holds, counted by `costs`: by default in stages of one
    micro-batch; None is no bound. `forward_only` wants a table without backwards, which holds no
    activations. `lanes` is judged where nothing else is wrong: the mirrored order comes from a
    run. Raises RequestError where `costs` are of another number of stages, and for no table.
    """
    costs.require(table.placement.num_stages)
    pp, num_rows = table.placement.pp, len(table.rows)
    if num_rows != pp or pp < 1:
        found, wanted = f"{num_rows} rows on {pp} ranks", "one row a rank"
        return (Violation("placement", num_rows, "the table", found, wanted),)
    located = _located(table)
    bound = None if forward_only else max_live
    steps = lower_rows(table)
    played = play(table, steps, costs=UNIT)
    violations = (
        *_operations(table, located, forward_only=forward_only),
        *_placement(table, located),
        *_pairs(table),
        *_order(located),
        *_accumulation(located),
        *(_live(table, bound, costs) if bound is not None else ()),
        *_channels(steps),
        *_progress(played),
    )
    return violations or verify_lanes(table, mirrored(steps, times=played.times))


def check(
    table: Table,
    *,
    max_live: Number | None = None,
    costs: Costs = UNIT,
    forward_only: bool = False,
) -> None:
    """Raise RunFailedError, with one fault per violation, unless `table` may be run."""
    violations = verify(table, max_live=max_live, costs=costs, forward_only=forward_only)
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
    """The violations of lowered rows with a channel for each direction of a pair of ranks."""
    return (*_channels(steps), *_progress(play(table, steps, costs=UNIT)))


def verify_lanes(
    table: Table, steps: tuple[tuple[Step, ...], ...], *, lane: Lane = "rank"
) -> tuple[Violation, ...]:
    """The violations of lowered rows where all messages of a rank, or of a pair, share a lane."""
    played = play(table, steps, costs=UNIT, lane=lane)
    violations = []
    for rank in sorted(played.blocked.keys() | played.heads.keys()):
        found = f"its lane at {played.heads.get(rank, 'its end')}"
        cell, wanted = "end of row", "an empty lane"
        if rank in played.blocked:
            slot, missing = played.blocked[rank]
            cell, found, wanted = slot_text(slot), f"waits for {missing}, {found}", "a start"
        violations.append(Violation("lanes", rank, cell, found, wanted))
    return tuple(violations)


def verify_executed(table: Table, executed: Sequence[Sequence[str]]) -> tuple[Violation, ...]:
    """Where what ran first differs from the table, for each rank.

    `executed[rank]` are the slots in the order in which `rank` ran them, in their text form.
    """
    violations = []
    for rank, (row, ran) in enumerate(zip_longest(table.rows, executed)):
        if row is None:
            found = f"{len(ran)} slots"
            violations.append(Violation("executed", rank, "the table", found, "no such rank"))
            continue
        texts = [slot_text(slot) for slot in row]
        for position, (wanted, found) in enumerate(zip_longest(texts, ran or ())):
            if wanted != found:
                cell = f"slot {position}, {wanted or 'end of row'}"
                named = _named(found, texts)
                violations.append(Violation("executed", rank, cell, named, wanted or "nothing"))
                break
    return tuple(violations)


def _named(executed: str | None, row: Sequence[str]) -> str:
    """What stands for a slot that ran, with its place in the row that was to run."""
    if executed is None:
        return "nothing"
    if executed in row:
        return f"{executed}, planned as slot {row.index(executed)}"
    try:
        parse_slot(executed)
    except ValueError:
        return f"{executed!r}, which is no slot"
    return f"{executed}, which is not in the row"


def _located(table: Table) -> Located:
    """Every operation with its rank and the position of its slot."""
    return [
        (rank, position, op)
        for rank, row in enumerate(table.rows)
        for position, slot in enumerate(row)
        for op in slot
    ]


def _operations(table: Table, located: Located, *, forward_only: bool) -> list[Violation]:
    place = table.placement
    kinds: dict[tuple[int, int], str] = {
        (stage, micro): ""
        for stage in range(place.num_stages)
        for micro in range(table.num_micro_batches)
    }
    violations = []
    if not kinds:
        found = f"{place.num_stages} stages, {table.num_micro_batches} micro-batches"
        violations.append(Violation("operations", 0, "the table", found, "at least 1 of each"))
    for rank, _, op in located:
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


def _placement(table: Table, located: Located) -> list[Violation]:
    return [
        Violation("placement", rank, str(op), f"on rank {rank}", f"rank {owner}")
        for rank, _, op in located
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


def _order(located: Located) -> list[Violation]:
    """What must come first on its rank: F for B and I, I for W."""
    place = {(rank, op): position for rank, position, op in located}
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


def _accumulation(located: Located) -> list[Violation]:
    last: dict[tuple[int, int, str], Op] = {}
    violations = []
    for rank, _, op in located:
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


def _live(table: Table, max_live: Number, costs: Costs) -> list[Violation]:
    """The first slot of each rank that holds too much; slots that cannot run hold nothing."""
    stages = range(table.placement.num_stages)
    violations = []
    for rank, row in enumerate(table.rows):
        held = tuple(slot for slot in row if slot and all(op.stage in stages for op in slot))
        for slot, count in zip(held, live(held, costs), strict=True):
            if count > max_live * SLACK:
                found, wanted = f"activations of {count}", f"at most {max_live}"
                violations.append(Violation("live", rank, slot_text(slot), found, wanted))
                break
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
                wanted = f"{expected}, which is sent" if expected else "none: nothing more is sent"
                violations.append(Violation("channels", channel[0], slot, found, wanted))
                break
    return violations


def _progress(played: Played) -> list[Violation]:
    return [
        Violation("progress", rank, slot_text(slot), f"waits for {missing}", "a start")
        for rank, (slot, missing) in played.blocked.items()
    ]
