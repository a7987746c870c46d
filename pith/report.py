"""The one JSON envelope that every command prints."""

import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pith
from pith.errors import PithError

SCHEMA = "pith/report/1"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked. A check that could not run is not `ok`.

    `details` is what is too long for a line; a command puts it into its data.
    """

    name: str
    ok: bool
    found: str = ""
    wanted: str = ""
    where: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What a command did. `ok` holds when the exit status is 0."""

    verb: str
    exit: int = 0
    checks: tuple[Check, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    error: PithError | None = None
    next: tuple[str, ...] = ()

    @classmethod
    def of_checks(
        cls,
        verb: str,
        checks: Sequence[Check],
        *,
        data: Mapping[str, Any],
        next: Sequence[str] = (),
    ) -> "Report":
        """What `checks` found: exit 0 where there are some and all held, 1 where one failed."""
        assert checks, "nothing was checked, which is no pass"
        status = 0 if all(check.ok for check in checks) else 1
        return cls(verb, exit=status, checks=tuple(checks), data=data, next=tuple(next))

    @property
    def ok(self) -> bool:
        return self.exit == 0

    def as_dict(self) -> dict[str, Any]:
        """The envelope as plain JSON values; non-finite numbers become null."""
        error: dict[str, Any] | None = None
        if self.error is not None:
            error = dict(self.error.as_dict())
            error["faults"] = [
                {"where": f.where, "found": f.found, "wanted": f.wanted, "nearest": list(f.nearest)}
                for f in self.error.faults
            ]
        envelope = {
            "schema": SCHEMA,
            "verb": self.verb,
            "ok": self.ok,
            "exit": self.exit,
            "checks": [
                {"name": c.name, "ok": c.ok, "found": c.found, "wanted": c.wanted, "where": c.where}
                for c in self.checks
            ],
            "data": dict(self.data),
            "error": error,
            "next": list(self.next),
            "env": environment(),
        }
        plain: dict[str, Any] = finite(envelope)
        return plain

    def json(self) -> str:
        """One line of JSON, keys sorted."""
        return json.dumps(self.as_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def of_error(cls, verb: str, error: PithError) -> "Report":
        """The report of a command that ended in `error`."""
        steps = (error.next_step,) if error.next_step.startswith("pith ") else ()
        return cls(verb=verb, exit=error.exit_status, error=error, next=steps)


def environment() -> dict[str, str]:
    """What produced a report, as far as it is known without importing torch."""
    return {
        "pith": pith.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
    }


def finite(value: Any) -> Any:
    """The same JSON value with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
