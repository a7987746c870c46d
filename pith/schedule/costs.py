"""What the parts of a schedule cost: time of each stage's operations, activations that it holds."""

from dataclasses import dataclass, fields, replace
from typing import Any

from pith.errors import Fault, RequestError, first_of
from pith.schedule.table import Kind, Op, Slot

Number = int | float
PerStage = Number | tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in any unit; each one number for every stage, or a tuple with one a stage.

    f, i, w       time of the forward, the input gradient and the weight gradient; B takes i + w
    comm          time that a message which the stage sends is under way
    activation    what one micro-batch holds of the stage, from its forward on
    w_store       the part of that which the input gradient keeps for W (B frees all at once)
    layers        layers of the stage, in which the two operations of a pair take turns
    pair          one number: a pair takes `pair` times the sum of its two operations
    """

    f: PerStage = 1
    i: PerStage = 1
    w: PerStage = 1
    comm: PerStage = 0
    activation: PerStage = 1
    w_store: PerStage = 1
    layers: PerStage = 1
    pair: Number = 1

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Read NAME=VALUE, separated by commas; a value is a number, or one a stage with colons.

        "f=2,i=2,w=1,pair=0.9" or "f=1:1:1:3". What is not named keeps its default. Raises
        RequestError with all faults.
        """
        faults: list[Fault] = []
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in _NAMES:
                wanted = f"one of {', '.join(_NAMES)}"
                faults.append(Fault("--costs", repr(part[:40]), f"NAME=VALUE with NAME {wanted}"))
            elif name in values:
                faults.append(Fault(f"--costs {name}", "two values", "one"))
            elif (read := _read(value)) is None:
                wanted = f"0, or from {LEAST:g} to {MOST:g}, or one a stage as in 1:1:2:3"
                faults.append(Fault(f"--costs {name}", repr(value[:40]), wanted))
            else:
                values[name] = read
        if isinstance(values.get("pair"), tuple):
            faults.append(Fault("--costs pair", "one a stage", "one number"))
        if faults:
            raise RequestError("schedule.costs", what=first_of(faults), faults=tuple(faults))
        return cls(**values)

    @property
    def is_by_stage(self) -> bool:
        """Whether any cost says one number a stage."""
        return any(isinstance(getattr(self, name), tuple) for name in _NAMES)

    def require(self, num_stages: int) -> None:
        """Raise RequestError where a tuple has another length than `num_stages`."""
        faults = tuple(
            Fault(f"--costs {name}", f"{len(cost)} values", f"1 or {num_stages}: one a stage")
            for name in _NAMES
            if isinstance(cost := getattr(self, name), tuple) and len(cost) != num_stages
        )
        if faults:
            raise RequestError("schedule.costs", what=first_of(faults), faults=faults)

    def operation(self, op: Op) -> Number:
        """The time of one operation alone."""
        match op.kind:
            case Kind.F:
                return at(self.f, op.stage)
            case Kind.I:
                return at(self.i, op.stage)
            case Kind.W:
                return at(self.w, op.stage)
            case Kind.B:
                return at(self.i, op.stage) + at(self.w, op.stage)

    def slot(self, slot: Slot) -> Number:
        """The time of a slot."""
        time = sum(self.operation(op) for op in slot)
        return time * self.pair if len(slot) > 1 else time

    def cut(self, share: int) -> "Costs":
        """The costs where each stage holds `share` times as much; messages stay as they are.

        For costs that are one number for every stage.
        """
        return replace(
            self,
            f=_times(self.f, share),
            i=_times(self.i, share),
            w=_times(self.w, share),
            activation=_times(self.activation, share),
            w_store=_times(self.w_store, share),
            layers=_times(self.layers, share),
        )


# What --costs takes besides 0: sums and quotients of such numbers are exact enough to be drawn.
LEAST, MOST = 1e-6, 1e9

_NAMES = tuple(field.name for field in fields(Costs))


def at(cost: PerStage, stage: int) -> Number:
    """The cost of one stage."""
    return cost[stage] if isinstance(cost, tuple) else cost


def _times(cost: PerStage, share: int) -> Number:
    assert not isinstance(cost, tuple), "costs by stage cannot be cut anew"
    return cost * share


def _read(text: str) -> PerStage | None:
    values = tuple(_read_number(part) for part in text.split(":"))
    if any(value is None for value in values):
        return None
    numbers = tuple(value for value in values if value is not None)
    return numbers[0] if len(numbers) == 1 else numbers


def _read_number(text: str) -> Number | None:
    """A whole number stays one, so that known answers stay exact."""
    try:
        value: Number = (
            int(text) if text.strip().isascii() and text.strip().isdecimal() else float(text)
        )
    except ValueError:
        return None
    return value if value == 0 or LEAST <= value <= MOST else None
