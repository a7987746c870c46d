"""The schedule table: which rank computes what, in which order.

A table is decided once, in pure Python, and then executed, simulated, drawn and verified.

    Op(kind, stage, micro)   one piece of compute. Its text form is F0.3: kind, stage, micro-batch.
                             F forward · B full backward · I input gradient · W weight gradient
    Slot                     (Op,) or an overlapped pair (F, B), forward first: F0.5|B7.1
    Table                    one row of slots per pipeline rank

`stage` counts along the model, from the embedding (0) to the head (num_stages - 1). I followed by
its own W is not B: the input gradient leaves earlier. Sends and receives are not in the table;
`pith.schedule.lower` derives them.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Kind(StrEnum):
    """What an operation computes."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the name that the literature uses
    W = "W"


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One piece of compute: `kind` of stage `stage` for micro-batch `micro`."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Read the text form. Raises ValueError naming the text."""
        stage, dot, micro = text[1:].partition(".")
        numbers_fit = all(part.isdecimal() and part.isascii() for part in (stage, micro))
        if text[:1] not in Kind.__members__ or not dot or not numbers_fit or len(text) > 40:
            raise ValueError(f"{text!r} is no operation; wanted KIND STAGE.MICRO, such as F0.3")
        return cls(Kind(text[0]), int(stage), int(micro))


Slot = tuple[Op, ...]
Style = Literal["loop", "v", "bidirectional"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank owns which stage.

    loop            stage s on rank s mod pp
    v               down the ranks and back up, alternating: with 2 pp stages, rank r owns r and
                    2 pp - 1 - r
    bidirectional   two copies of pp stages; the first half of the micro-batches enters at rank 0,
                    the second half at rank pp - 1 (simulation only)
    """

    style: Style
    pp: int
    num_stages: int
    num_micro_batches: int = 0  # only read by bidirectional

    def rank(self, stage: int, micro: int = 0) -> int:
        """The pipeline rank that computes `stage` of `micro`."""
        lap, position = divmod(stage, self.pp)
        if self.style == "loop":
            return position
        if self.style == "v":
            return position if lap % 2 == 0 else self.pp - 1 - position
        return position if 2 * micro < self.num_micro_batches else self.pp - 1 - position

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, in model order."""
        micros = (0,) if self.style != "bidirectional" else (0, self.num_micro_batches - 1)
        return tuple(
            stage
            for stage in range(self.num_stages)
            if any(self.rank(stage, micro) == rank for micro in micros)
        )


@dataclass(frozen=True, slots=True)
class Table:
    """The whole schedule: `rows[rank]` is the order in which `rank` computes its slots."""

    name: str
    placement: Placement
    num_micro_batches: int
    rows: tuple[tuple[Slot, ...], ...]

    def row_texts(self) -> tuple[str, ...]:
        """One string per rank, cells separated by one space."""
        return tuple(" ".join(slot_text(slot) for slot in row) for row in self.rows)

    def digest(self) -> str:
        """A hash of everything that decides execution; equal on all ranks or the run stops."""
        place = self.placement
        counts = (place.pp, place.num_stages, place.num_micro_batches, self.num_micro_batches)
        head = f"{place.style} {' '.join(map(str, counts))}"
        return hashlib.sha256("\n".join((head, *self.row_texts())).encode()).hexdigest()


def slot_text(slot: Slot) -> str:
    """The text form of a slot: F0.3, or F0.5|B7.1 for a pair."""
    return "|".join(str(op) for op in slot)


def parse_slot(text: str) -> Slot:
    """Read the text form of a slot. Raises ValueError naming the text."""
    return tuple(Op.parse(part) for part in text.split("|"))


def parse_rows(texts: tuple[str, ...]) -> tuple[tuple[Slot, ...], ...]:
    """Read one string per rank, the inverse of `Table.row_texts`."""
    return tuple(tuple(parse_slot(cell) for cell in text.split()) for text in texts)
