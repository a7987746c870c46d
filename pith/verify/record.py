"""One run as its folder tells it: recipe, environment, steps, and whether all of that is whole."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pith.checkpoint.shelf import Found, look
from pith.config import Recipe
from pith.config.changes import ABSENT, changes, text
from pith.errors import RequestError
from pith.plan.mesh import Mesh
from pith.report import Check
from pith.run.folder import RunFolder
from pith.run.metrics import read_events, read_steps
from pith.train.start import shelf_of
from pith.verify.steps import (
    finite_number,
    first_few,
    is_count,
    is_text,
    number_of,
    said,
    step_faults,
    value_faults,
)

CONFIG, ENVIRONMENT = "config.toml", "environment.json"


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder. Nothing in `steps` and `validations` is to be trusted before `checks` held."""

    label: str
    path: Path
    run_id: str
    recipe: Recipe
    environment: Mapping[str, Any]
    steps: tuple[dict[str, Any], ...]  # of metrics.jsonl, as written
    validations: Mapping[int, Any]  # loss by step
    resumed: frozenset[int]  # steps after which another process went on
    broken: str  # why metrics.jsonl could not be read whole; "" where it was
    checkpoint: Found  # of the last step of the recipe, whatever is there

    @property
    def num_steps(self) -> int:
        """How many steps the recipe asks for."""
        return self.recipe.training.steps

    @property
    def by_step(self) -> dict[int, dict[str, Any]]:
        """The steps by number; of several with one number the first."""
        numbered = ((number_of(step), step) for step in reversed(self.steps))
        return {number: step for number, step in numbered if number is not None}

    @property
    def mesh(self) -> Mesh:
        """The mesh it ran on; the smallest of its recipe where the world size is not known."""
        world_size = self.environment.get("world_size")
        try:
            return self.recipe.mesh(world_size if is_count(world_size) else None)
        except RequestError:
            return self.recipe.mesh()

    def checks(self) -> tuple[Check, ...]:
        """Whether the run is whole and all that it tells is finite."""
        return (
            self._check("environment", self._environment_faults(), "device, versions, world size"),
            self._check("metrics", [self.broken] if self.broken else [], "every line whole"),
            self._check(
                "steps",
                [*step_faults(self.steps, num_steps=self.num_steps)],
                f"1 to {self.num_steps}, each once",
            ),
            self._check("values", [*self._value_faults()], "everything there and finite"),
            self._check("finished", [*self._end_faults()], f"a report after {self.num_steps}"),
            self._check("checkpoint", self._checkpoint_faults(), "the last step, complete"),
            self._check("recipe", [*self._recipe_faults()], "what the checkpoint was saved with"),
        )

    def _check(self, name: str, faults: Sequence[str], wanted: str) -> Check:
        """One check: the first faults, and how many more there are."""
        found = first_few(faults) or wanted
        return Check(f"{self.label} {name}", not faults, found, wanted, str(self.path))

    def _environment_faults(self) -> list[str]:
        told, faults = self.environment, []
        texts = [key for key in ("device", "torch", "machine") if not is_text(told.get(key))]
        faults += [f"{key} is {said(told, key)}" for key in texts]
        if not is_text(_variables(told).get("OMP_NUM_THREADS")) and not is_count(
            told.get("cpu_count")
        ):
            faults.append(f"cpu_count is {said(told, 'cpu_count')}")
        world_size = told.get("world_size")
        if not is_count(world_size) or self.mesh.world_size != world_size:
            faults.append(f"world_size is {said(told, 'world_size')}")
        return faults

    def _value_faults(self) -> Iterator[str]:
        widths = dict.fromkeys(self._moe_layers, self.recipe.architecture.num_choices)
        for step in self.steps:
            yield from value_faults(step, widths, top_k=self.recipe.architecture.top_k)
        for number, loss in self.validations.items():
            if finite_number(loss) is None:
                yield f"step {number}: validation_loss is {said({'': loss}, '')}"

    @property
    def _moe_layers(self) -> set[str]:
        """The layers that have experts, as metrics.jsonl names them."""
        model = self.recipe.architecture
        return {str(layer) for layer in range(model.num_layers) if model.is_moe(layer)}

    def _end_faults(self) -> Iterator[str]:
        report = RunFolder(self.path, id="").read_finished()
        if report is None:
            yield "no report: the run did not come to its end"
        elif report["steps"] != self.num_steps:
            yield f"a report after step {report['steps']}"
        elif (told := report.get("validation_loss")) != (
            last := self.validations.get(self.num_steps)
        ):
            yield f"the report tells of validation loss {told}, the metrics of {last}"
        else:
            for step, name in ((1, "first_loss"), (self.num_steps, "last_loss")):
                loss = self.by_step.get(step, {}).get("loss")
                if report.get(name) != loss:
                    yield f"the report tells of {name} {said(report, name)}, the metrics of {loss}"

    def _recipe_faults(self) -> Iterator[str]:
        """Where config.toml and environment.json, which anyone can edit, differ from what the
        last checkpoint was sealed with."""
        saved = self.checkpoint.manifest
        if saved is None:
            yield "no checkpoint says"
            return
        # A key that came to pith after the run has its default here and stands in neither.
        written = self.recipe.model_dump(mode="json", exclude_unset=True)
        added = changes(saved.recipe, written)
        for change in changes(saved.recipe, self.recipe.model_dump(mode="json")):
            if change.before != ABSENT or change in added:
                yield text(change)
        mesh = self.mesh
        layout = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "ep")}
        told = {axis: saved.layout.get(axis) for axis in layout}
        if told != layout:
            yield f"layout {layout}, the checkpoint has {told}"

    def _checkpoint_faults(self) -> list[str]:
        saved = self.checkpoint.manifest
        is_foreign = saved is not None and saved.run != self.run_id
        foreign = ["another run saved it, or run.json is not whole"] if is_foreign else []
        return [*(str(fault) for fault in self.checkpoint.faults), *foreign]


def read_run(path: Path, *, label: str) -> Run:
    """The run in the folder `path`; `label` names it in reports.

    Raises RequestError where `path` is no run folder: no config.toml, or none that loads. Whatever
    else is wrong is what `checks` is for.
    """
    config, metrics = path / CONFIG, path / "metrics.jsonl"
    if not _is_file(config):
        raise RequestError(
            "verify.no-run",
            what="this is no run folder",
            found=f"no {CONFIG} in such a folder",
            wanted=f"a folder that pith train wrote, with its {CONFIG}",
            where=str(path),
            next_step="name a folder such as runs/tiny-moe",
        )
    recipe = _recipe(config)
    checkpoint = shelf_of(recipe, RunFolder(path, id="")).folder(recipe.training.steps)
    files = [path / name for name in ("run.json", "report.json", ENVIRONMENT)]
    _refuse_special([*files, metrics, *(checkpoint.glob("*") if checkpoint.is_dir() else ())])
    told = _read_metrics(metrics)
    return Run(
        label=label,
        path=path,
        run_id=_run_id(path),
        recipe=recipe,
        environment=_environment(path / ENVIRONMENT),
        steps=tuple(told.steps),
        validations={e["step"]: e.get("validation_loss") for e in told.validations},
        resumed=frozenset(e["step"] for e in told.resumed),
        broken=told.broken,
        checkpoint=look(checkpoint),
    )


@dataclass(frozen=True, slots=True)
class _Metrics:
    """What metrics.jsonl tells; all of it empty where any line but the last is `broken`."""

    steps: Sequence[dict[str, Any]] = ()
    validations: Sequence[dict[str, Any]] = ()
    resumed: Sequence[dict[str, Any]] = ()
    broken: str = ""


def _read_metrics(path: Path) -> _Metrics:
    try:
        return _Metrics(
            steps=read_steps(path),
            validations=[e for e in read_events(path, "validation") if number_of(e)],
            resumed=[e for e in read_events(path, "resumed") if number_of(e)],
            broken=_torn(path),
        )
    except RequestError as error:
        return _Metrics(broken=f"{error.where}: {error.found}")
    except OSError as error:
        return _Metrics(broken=f"{path}: {error.strerror or error}")


def _refuse_special(paths: Iterable[Path]) -> None:
    """Raise RequestError for a FIFO or a device, of which reading may never end."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise RequestError(
                "verify.no-file",
                what="this is no file of a run",
                found="a FIFO, a socket or a device",
                wanted="a regular file",
                where=str(path),
                next_step="copy the run folder anew",
            )


def _run_id(path: Path) -> str:
    """The id in run.json; "" where there is no whole one."""
    place = path.absolute()
    try:
        folder = RunFolder.find(place.parent, place.name, origin=None)
    except RequestError:
        return ""
    return folder.id if folder else ""


def _recipe(config: Path) -> Recipe:
    try:
        return Recipe.load(config)
    except RequestError as error:
        raise RequestError(
            "verify.no-run",
            what="this is no run folder: its recipe does not load",
            found=error.found or error.what,
            wanted=f"the {CONFIG} that pith train wrote",
            where=str(config),
            next_step=f"pith recipe show {shlex.quote(str(config))}",
            faults=error.faults,
        ) from error


def _torn(metrics: Path) -> str:
    """What is wrong with the end of the file: a last line that no process finished."""
    if not metrics.exists():
        return f"{metrics}: no such file"
    content = metrics.read_bytes()
    return "" if content.endswith(b"\n") else f"{metrics}: the last line is cut short"


def _environment(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _variables(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = environment.get("variables")
    return variables if isinstance(variables, Mapping) else {}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
