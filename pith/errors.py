"""What can go wrong, and what a caller should do about it.

PithError                  exit 4: pith itself broke (the base is never raised as such)
├── RequestError           exit 2: the request was wrong (recipe, option, path, input file)
├── UnavailableError       exit 3: it could not be done here (no GPU, too few ranks, missing extra)
├── RunFailedError         exit 1: it ran and failed (non-finite, out of memory, lost rank)
└── StoppedError           exit 75: a signal stopped it and a checkpoint is saved; run it again

Every error is one line: what, found, wanted, where, next. Several faults of one request travel
together in `faults`, one line each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong value: where it stands, what was found, what was wanted, what would be valid."""

    where: str
    found: str
    wanted: str
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{self.where}: found {self.found}, wanted {self.wanted}"
        return f"{line} (nearest valid: {', '.join(self.nearest)})" if self.nearest else line


def shown(value: Any) -> str:
    """A value as people read it, a long one cut short."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def first_of(faults: Sequence[Fault]) -> str:
    """The first of several faults, and how many more there are, in one line."""
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    return f"{faults[0]}{more}"


class PithError(Exception):
    """An error that a person or an agent can act on.

    `code` is stable and dotted ("recipe.invalid"); `next_step` is a command or an instruction.
    """

    exit_status: ClassVar[int] = 4

    def __init__(
        self,
        code: str,
        *,
        what: str,
        found: str = "",
        wanted: str = "",
        where: str = "",
        next_step: str = "",
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self.code = code
        self.what = what
        self.found = found
        self.wanted = wanted
        self.where = where
        self.next_step = next_step
        self.faults = faults
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.found:
            line += f"; found {self.found}"
        if self.wanted:
            line += f"; wanted {self.wanted}"
        if self.next_step:
            line += f"; next: {self.next_step}"
        return line

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.as_dict(), self.faults)

    def as_dict(self) -> dict[str, str]:
        """The text fields, for the JSON report."""
        names = ("code", "what", "found", "wanted", "where", "next_step")
        return {name: getattr(self, name) for name in names}


class RequestError(PithError):
    """The request was wrong; nothing was started and nothing was changed."""

    exit_status = 2


class UnavailableError(PithError):
    """The request is sound but cannot be served on this machine."""

    exit_status = 3


class RunFailedError(PithError):
    """The work started and failed."""

    exit_status = 1


class StoppedError(PithError):
    """A signal asked the run to stop: its checkpoint is saved, the same command goes on."""

    exit_status = 75


def _rebuild(kind: type[PithError], fields: dict[str, str], faults: tuple[Fault, ...]) -> PithError:
    code = fields.pop("code")
    return kind(code, faults=faults, **fields)
