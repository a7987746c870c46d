"""A run folder's trace beside the plan of its recipe: what was to run, what ran, and when."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pith.config import Recipe
from pith.errors import RequestError
from pith.plan.mesh import Mesh
from pith.plan.pipeline import Pipeline
from pith.run.folder import RunFolder
from pith.run.trace import TracedStep, read_trace
from pith.schedule.costs import Number
from pith.schedule.simulate import Span, simulate
from pith.schedule.table import slot_text
from pith.schedule.timeline import Timeline
from pith.schedule.verify import Violation, verify_executed


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What a run folder says of the steps that were traced."""

    path: Path
    pipeline: Pipeline
    mesh: Mesh
    steps: tuple[TracedStep, ...]

    @classmethod
    def read(cls, path: Path) -> "TracedRun":
        """The run in the folder `path`. Raises RequestError where anything of it is missing."""
        folder = RunFolder(path, id="")
        text = folder.recipe_toml if path.is_dir() else None
        if text is None:
            raise _no_run(path, found="no config.toml" if path.is_dir() else "no such folder")
        world_size = _world_size(path / "environment.json")
        recipe = Recipe.parse(text, world_size)
        steps = read_trace(folder.trace)
        mesh = recipe.mesh(world_size)
        if (found := len(steps[0].rows)) != mesh.world_size:
            raise _no_run(path, found=f"a trace of {found} ranks for a run of {mesh.world_size}")
        return cls(path, recipe.pipeline(world_size), mesh, steps)

    def pipelines(self) -> Iterator[tuple[int, ...]]:
        """The global ranks of each pipeline, in the order of their stages."""
        for rank in range(self.mesh.world_size):
            if self.mesh.coordinates(rank).pp == 0:
                yield tuple(self.mesh.peers(rank, "pp"))

    def violations(self) -> Iterator[tuple[TracedStep, tuple[int, ...], tuple[Violation, ...]]]:
        """Each traced step of each pipeline, with what differs from the table."""
        for step in self.steps:
            for ranks in self.pipelines():
                executed = [[slot_text(s.slot) for s in step.rows[rank]] for rank in ranks]
                yield step, ranks, verify_executed(self.pipeline.table, executed)

    def _require_drawable(
        self, step: TracedStep, ranks: tuple[int, ...], rows: tuple[tuple[Span, ...], ...]
    ) -> None:
        """Raise RequestError where a rank ran what its place in the pipeline does not have."""
        place, count = self.pipeline.table.placement, self.pipeline.table.num_micro_batches
        for stages, rank, row in zip(map(place.stages, range(place.pp)), ranks, rows, strict=True):
            for span in row:
                if any(op.stage not in stages or op.micro >= count for op in span.slot):
                    raise RequestError(
                        "schedule.run",
                        what=f"step {step.step} did not run the plan of its recipe",
                        found=f"{slot_text(span.slot)} on rank {rank}",
                        wanted=f"stages {stages}, micro-batches below {count}",
                        where=f"--trace {self.path}",
                        next_step=f"pith schedule verify --trace {self.path}",
                    )

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Planned and measured, of the last traced step and the pipeline of rank 0.

        Both begin with their first slot. The plan takes the costs of the layers' FLOPs, in such
        seconds that its work is as much as what was measured.
        """
        step, ranks = self.steps[-1], next(self.pipelines())
        rows = tuple(step.rows[rank] for rank in ranks)
        self._require_drawable(step, ranks, rows)
        begin = min((row[0].start for row in rows if row), default=0.0)
        planned = Timeline.planned(simulate(self.pipeline.table, self.pipeline.costs))
        factor = _work(rows) / (_work(planned.rows) or 1)
        scaled, rows = _moved(planned.rows, scale=factor), _moved(rows, begin=begin)
        title = f"{planned.title}; {self.path.name}, step {step.step}"
        return (
            replace(planned, rows=scaled, title=title, unit="s"),
            replace(planned, rows=rows, title=title, unit="s", measured=True),
        )


def _moved(
    rows: tuple[tuple[Span, ...], ...], *, begin: Number = 0, scale: float = 1.0
) -> tuple[tuple[Span, ...], ...]:
    return tuple(
        tuple(Span(s.slot, (s.start - begin) * scale, (s.end - begin) * scale) for s in row)
        for row in rows
    )


def _work(rows: tuple[tuple[Span, ...], ...]) -> float:
    """The busy time of all ranks."""
    return float(sum(span.end - span.start for row in rows for span in row))


def _world_size(path: Path) -> int:
    """How many ranks the run had when it was last started."""
    try:
        found = json.loads(path.read_bytes())
        world_size = found["world_size"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise _no_run(path.parent, found=f"{path.name}: {error}") from error
    if type(world_size) is not int or world_size < 1:
        raise _no_run(path.parent, found=f"{path.name}: world_size {world_size!r}")
    return world_size


def _no_run(path: Path, *, found: str) -> RequestError:
    return RequestError(
        "schedule.run",
        what="there is no traced run here",
        found=found,
        wanted="the folder of a run that took a step of log.trace_steps",
        where=f"--trace {path}",
        next_step="pith train --resume never, then name its run folder",
    )
