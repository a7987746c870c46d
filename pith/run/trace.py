"""The measured timeline: what each rank really ran in the steps that were traced, and when.

A file a rank, `rank-00000.jsonl`; in it a line a traced step, a JSON object:

    step     from 1, as the run counts
    ranks    how many ranks trained; files of ranks beyond are left from an earlier, larger world
    clock    "host", or "device" for times of CUDA events
    slots    [text, start, end] of each slot in order, in seconds since a moment that ranks share
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pith.errors import RequestError, RunFailedError
from pith.schedule.simulate import Span
from pith.schedule.table import parse_slot, slot_text

MOST_SECONDS = 1e6  # a slot that ends later is no measurement


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What one rank writes. Raises RunFailedError where it cannot."""

    folder: Path
    rank: int
    num_ranks: int

    @property
    def path(self) -> Path:
        return _path(self.folder, self.rank)

    def clear(self) -> None:
        """Drop what an earlier process wrote.

        Every rank does so before the ranks meet in the first step that they trace, and so nobody
        reads that step of one rank beside an older one of another.
        """
        with self._told():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")

    def append(self, step: int, *, clock: str, spans: Sequence[Span]) -> None:
        """Add a step, its times rounded to nanoseconds."""
        slots = [(slot_text(s.slot), round(s.start, 9), round(s.end, 9)) for s in spans]
        line = {"step": step, "ranks": self.num_ranks, "clock": clock, "slots": slots}
        with self._told(), self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailedError(
                "trace.unwritable",
                what="the trace cannot be written",
                found=error.strerror or str(error),
                where=str(self.path),
                next_step="make room, or --set log.trace_steps=[]",
            ) from error


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step as all ranks ran it. `rows[rank]` holds the spans of a global rank, in its order."""

    step: int
    clock: str
    rows: tuple[tuple[Span, ...], ...]


def read_trace(folder: Path, *, step: int | None = None) -> tuple[TracedStep, ...]:
    """Every step that was traced, or `step` alone.

    Raises RequestError when a rank's file is missing, cut short or broken, when the files do not
    belong together, or when a rank lacks a step that is asked for: one that any other rank has.
    """
    first = _read(_path(folder, 0))
    num_ranks = next(iter(first.values())).ranks
    files = [first, *(_read(_path(folder, rank)) for rank in range(1, num_ranks))]
    steps = sorted({step for lines in files for step in lines}) if step is None else [step]
    return tuple(_joined(folder, files, step) for step in steps)


def _sound(timed: tuple[str, float, float]) -> tuple[str, float, float]:
    text, start, end = timed
    parse_slot(text)
    if end < start:
        raise ValueError(f"{text} ends at {end}, before its start at {start}")
    return timed


_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


class _Line(BaseModel):
    """A step of one rank, as in the file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    step: _Count
    ranks: _Count
    clock: Literal["host", "device"]
    slots: tuple[Annotated[tuple[str, _Seconds, _Seconds], AfterValidator(_sound)], ...]

    @property
    def row(self) -> tuple[Span, ...]:
        return tuple(
            Span(parse_slot(text), round(start, 9), round(end, 9))
            for text, start, end in self.slots
        )


def _read(path: Path) -> dict[int, _Line]:
    """The lines of one rank by step: at least one, and each step after the one before."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("no regular file")
        *texts, rest = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, found=str(error), wanted="the file of each rank") from error
    if rest or not texts:
        raise _unreadable(path, found=f"{len(texts)} whole lines and {len(rest)} characters")
    lines: dict[int, _Line] = {}
    for number, text in enumerate(texts, 1):
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            fault, place = error.errors()[0], f"{path}:{number}"
            where = ".".join(map(str, fault["loc"]))
            raise _unreadable(place, found=f"{where} {fault['msg']}".strip()) from error
        if line.step <= max(lines, default=0):
            raise _unreadable(f"{path}:{number}", found=f"step {line.step} after {max(lines)}")
        lines[line.step] = line
    return lines


def _joined(folder: Path, files: Sequence[Mapping[int, _Line]], step: int) -> TracedStep:
    """One step of all ranks, which must have it and agree on how it was measured."""
    for rank, lines in enumerate(files):
        path = _path(folder, rank)
        if step not in lines:
            found = f"steps {', '.join(map(str, lines))}"
            raise _unreadable(path, found=found, wanted=f"step {step} of every rank")
        found = f"{lines[step].ranks} ranks by the {lines[step].clock}"
        wanted = f"{len(files)} ranks by the {files[0][step].clock}"
        if found != wanted:
            raise _unreadable(path, found=found, wanted=f"{wanted}, as rank 0 says")
    rows = tuple(lines[step].row for lines in files)
    return TracedStep(step, files[0][step].clock, rows)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def _unreadable(
    where: Path | str, *, found: str, wanted: str = "whole lines, a step each, in order"
) -> RequestError:
    return RequestError(
        "trace.unreadable",
        what="the trace cannot be read",
        found=found,
        wanted=wanted,
        where=str(where),
        next_step="wait until every rank has taken the step, or train anew with log.trace_steps",
    )
