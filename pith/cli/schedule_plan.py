"""The schedule that a command line means: by options, by a recipe, or by what a run left behind."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pith.cli.output import check_out
from pith.cli.traced import TracedRun
from pith.config import Recipe
from pith.errors import Fault, RequestError, first_of
from pith.plan.pipeline import Pipeline
from pith.schedule.auto import Choice, auto
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build
from pith.schedule.costs import Costs
from pith.schedule.simulate import Simulation, simulate
from pith.schedule.table import Placement, Table

# Stages x (micro-batches + stages) that are built and drawn within seconds; auto builds them all.
MOST_CELLS, MOST_CELLS_OF_AUTO = 25_000, 10_000
VIRTUAL = 2  # stages a rank of which --costs speaks where auto chooses


@dataclass(frozen=True, slots=True)
class Plan:
    """A table and what its stages cost; why it was chosen where auto did, and the run it is of."""

    table: Table
    costs: Costs
    choice: Choice | None = None
    max_live: float | None = None
    run: TracedRun | None = None

    @property
    def simulation(self) -> Simulation:
        return simulate(self.table, self.costs)

    @property
    def data(self) -> dict[str, Any]:
        """What every command tells of it."""
        place = self.table.placement
        told = {
            "schedule": self.table.name,
            "placement": place.style,
            "pp": place.pp,
            "num_stages": place.num_stages,
            "num_micro_batches": self.table.num_micro_batches,
        }
        if self.choice is not None:
            told["candidates"] = [asdict(found) for found in self.choice.candidates]
        return told

    @property
    def text(self) -> str:
        """The same in a line, and below it what auto had to choose from."""
        place, count = self.table.placement, self.table.num_micro_batches
        head = (
            f"{self.table.name}: pp {place.pp}, {place.num_stages} stages ({place.style}), "
            f"{count} micro-batches"
        )
        return "\n".join((head, *(self.choice.lines() if self.choice else ())))


def of_options(
    *,
    recipe: str | None,
    schedule: str | None,
    pp: int | None,
    micro_batches: int | None,
    virtual: int | None,
    costs: str | None,
    max_live: float | None,
    overrides: list[str] | None,
    nproc: int | None,
    trace: Path | None,
) -> Plan:
    """The plan that the options mean. Raises RequestError where they contradict each other."""
    by_hand = {
        "--schedule": schedule,
        "--pp": pp,
        "--micro-batches": micro_batches,
        "--virtual": virtual,
        "--costs": costs,
        "--max-live": max_live,
    }
    of_recipe = {"--set": overrides or None, "--nproc": nproc}
    if trace is not None:
        _refuse({"RECIPE": recipe, **by_hand, **of_recipe}, beside="--trace")
        run = TracedRun.read(trace)
        return _of_pipeline(run.pipeline, run)
    if recipe is not None:
        _refuse(by_hand, beside="RECIPE", instead="--set parallel.pp=2 and the like")
        return _of_pipeline(Recipe.load(recipe, overrides or (), nproc).pipeline(nproc))
    _refuse(of_recipe, beside="no RECIPE")
    pp = 4 if pp is None else pp
    return by_numbers(
        "auto" if schedule is None else schedule,
        pp=pp,
        num_micro_batches=2 * pp if micro_batches is None else micro_batches,
        virtual=virtual,
        costs=Costs.parse(costs or ""),
        max_live=max_live,
    )


def by_numbers(
    schedule: str,
    *,
    pp: int,
    num_micro_batches: int,
    virtual: int | None,
    costs: Costs,
    max_live: float | None,
) -> Plan:
    """The plan of `schedule`, "auto" included. Raises RequestError for what cannot be."""
    most = MOST_CELLS_OF_AUTO if schedule == "auto" else MOST_CELLS
    _require_size(pp, num_micro_batches, virtual, most=most)
    if max_live is not None and not (math.isfinite(max_live) and max_live > 0):
        raise _unfit(Fault("--max-live", str(max_live), "a number above 0"))
    if schedule != "auto":
        table = build(
            schedule,
            pp=pp,
            num_micro_batches=num_micro_batches,
            virtual=virtual,
            costs=costs,
            max_live=max_live,
        )
        costs.require(table.placement.num_stages)
        return Plan(table, costs, max_live=max_live)
    if virtual is not None:
        raise _unfit(Fault("--virtual", str(virtual), "nothing: auto chooses", ()))
    num_stages = VIRTUAL * pp
    costs.require(num_stages)

    def costs_of(place: Placement) -> Costs:
        return (
            costs if place.num_stages == num_stages else costs.cut(num_stages // place.num_stages)
        )

    choice = auto(
        pp,
        num_micro_batches=num_micro_batches,
        costs=costs_of,
        max_live=max_live,
        num_stages=num_stages if costs.is_by_stage else None,
    )
    return Plan(choice.table, choice.costs, choice, max_live)


def _of_pipeline(pipeline: Pipeline, run: TracedRun | None = None) -> Plan:
    return Plan(pipeline.table, pipeline.costs, pipeline.choice, run=run)


def _require_size(pp: int, num_micro_batches: int, virtual: int | None, *, most: int) -> None:
    """Refuse a table that nobody would wait for."""
    num_stages = pp * (virtual or VIRTUAL)
    cells = num_stages * (num_micro_batches + num_stages)
    if cells > most:
        found = f"{num_stages} stages of {num_micro_batches} micro-batches"
        wanted = f"stages * (micro-batches + stages) up to {most:,}, not {cells:,}"
        raise _unfit(Fault("--pp, --micro-batches, --virtual", found, wanted))


def _refuse(options: Mapping[str, object], *, beside: str, instead: str = "") -> None:
    """Refuse options that say what is said already."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise RequestError(
            "schedule.options",
            what=f"{', '.join(given)} cannot stand beside {beside}",
            next_step=instead or f"leave out {', '.join(given)}",
        )


def _unfit(*faults: Fault) -> RequestError:
    return RequestError("schedule.request", what=first_of(faults), faults=faults)


_OPTIONS: dict[str, Any] = {
    "recipe": Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Plan what this recipe runs instead.")
    ],
    "schedule": Annotated[
        str | None,
        typer.Option("--schedule", help=f"auto, {', '.join((*SCHEDULES, *SIMULATION_ONLY))}."),
    ],
    "pp": Annotated[int | None, typer.Option("--pp", help="Pipeline ranks; by default 4.")],
    "micro_batches": Annotated[
        int | None, typer.Option("--micro-batches", help="Micro-batches; by default 2 pp.")
    ],
    "virtual": Annotated[
        int | None, typer.Option("--virtual", help="Stages a rank of interleaved and list: 2.")
    ],
    "costs": Annotated[
        str | None,
        typer.Option(
            "--costs",
            metavar="f=1,w=2,...",
            help="f, i, w, comm, activation, w_store, layers: a number, or one a stage as in "
            "1:1:2:3; pair: the time of a pair in parts of the sum. For auto: of a stage where a "
            "rank has two.",
        ),
    ],
    "max_live": Annotated[
        float | None, typer.Option("--max-live", help="Activations that a rank may hold.")
    ],
    "overrides": Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a value of RECIPE.")
    ],
    "nproc": Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks of RECIPE.")],
    "trace": Annotated[
        Path | None,
        typer.Option("--trace", metavar="RUN", help="A run folder: what really ran there."),
    ],
}


def planned(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that say which schedule is meant; `command` gets the Plan.

    It has an option `out` of its own, which is checked before the plan is made.
    """

    def with_options(**given: Any) -> None:
        check_out(given["out"])
        chosen = {name: given.pop(name) for name in _OPTIONS}
        command(of_options(**chosen), **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    parameters = (*common, *own)
    with_options.__doc__ = command.__doc__
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(with_options)["__signature__"] = inspect.Signature(parameters)
    return with_options
