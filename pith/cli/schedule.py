"""`pith schedule`: a schedule as its table, as a picture, in simulated time, and verified.

A plan comes from options, from a RECIPE (whose stages cost what its layers do), or with --trace
from a run, whose trace says what really ran. The JSON data of every command: schedule, placement,
pp, num_stages, num_micro_batches, and where auto chose, candidates. Besides:

show      rows (a string per rank), stages (those of each rank), digest
simulate  makespan, bubble, efficiency; per rank work, idle, peak_live, peak_w_store; of a run also
          measured {step, makespan, bubble, work, idle} in seconds
draw      format, and picture, or path with --out
verify    violations [{invariant, rank, slot, found, wanted}], and of a run steps
"""

import json as json_text
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pith.cli.output import emit, put, write_whole
from pith.cli.schedule_plan import Plan, planned
from pith.errors import RequestError
from pith.report import Check, Report
from pith.schedule import chrome, draw, svg
from pith.schedule.costs import Number
from pith.schedule.timeline import Timeline, number
from pith.schedule.verify import INVARIANTS, Violation, verify

MOST_COLUMNS = 20_000  # of a text where no --width is given

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the same JSON to this file.")]


def schedule_app() -> typer.Typer:
    """The commands under `pith schedule`."""
    app = typer.Typer(help="Pipeline schedules: the table, its times, its picture, its proof.")
    app.command("show")(planned(show_command))
    app.command("simulate")(planned(simulate_command))
    app.command("draw")(planned(draw_command))
    app.command("verify")(planned(verify_command))
    return app


def show_command(plan: Plan, *, json: Json = False, out: Out = None) -> None:
    """Show the table: what each rank computes, in its order."""
    table = plan.table
    rows = list(table.row_texts())
    stages = [list(table.placement.stages(rank)) for rank in range(table.placement.pp)]
    data = {**plan.data, "rows": rows, "stages": stages, "digest": table.digest()}
    lines = (f"rank {rank}  {row}" for rank, row in enumerate(rows))
    text = "\n".join((plan.text, *lines))
    emit(Report("schedule show", data=data), json=json, out=out, text=text)


def simulate_command(plan: Plan, *, json: Json = False, out: Out = None) -> None:
    """Simulate the table: how long it takes, what idles, what is held."""
    found = plan.simulation
    data = {
        **plan.data,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "efficiency": found.efficiency,
        "work": list(found.work),
        "idle": list(found.idle),
        "peak_live": list(found.peak_live),
        "peak_w_store": list(found.peak_w_store),
    }
    lines = [plan.text, Timeline.planned(found).summary, f"efficiency {found.efficiency:.3f}"]
    columns = ("work", "idle", "peak_live", "peak_w_store")
    lines += _columns(("work", "idle", "peak live", "peak W store"), [data[c] for c in columns])
    if plan.run is not None:
        _, measured = plan.run.timelines()
        data["measured"] = _measured(measured) | {"step": plan.run.steps[-1].step}
        lines.append(f"step {data['measured']['step']}: {measured.summary}")
    emit(Report("schedule simulate", data=data), json=json, out=out, text="\n".join(lines))


def draw_command(
    plan: Plan,
    *,
    format: Annotated[
        Literal["text", "svg", "trace"],
        typer.Option("--format", help="trace: Chrome trace JSON, which Perfetto opens."),
    ] = "text",
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Columns of a text, at most; by default as many as needed."),
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the picture to this file, not to stdout.")
    ] = None,
) -> None:
    """Draw the table over simulated time; with --trace what was measured beside it."""
    if width is not None and format != "text":
        raise RequestError(
            "schedule.options",
            what=f"--width says how wide a text is, and --format {format} is none",
            next_step="leave out --width",
        )
    timelines = (
        plan.run.timelines() if plan.run is not None else (Timeline.planned(plan.simulation),)
    )
    picture = "".join(_drawn(timelines, format, width or MOST_COLUMNS))
    data = {**plan.data, "format": format}
    if out is None:
        data["picture"] = picture
        if not json:
            put(picture)
    else:
        write_whole(out, text=picture)
        data["path"] = str(out)
    text = plan.text if out is None or json else f"{plan.text}\nwritten to {out}"
    emit(Report("schedule draw", data=data), json=json, out=None, text=text)


def verify_command(plan: Plan, *, json: Json = False, out: Out = None) -> None:
    """Verify the table on both transports; with --trace also that what ran equals it."""
    found = [*verify(plan.table, costs=plan.costs, max_live=plan.max_live)]
    checks = [_check(name, found) for name in INVARIANTS if name != "executed"]
    data: dict[str, Any] = dict(plan.data)
    if plan.run is not None:
        data["steps"] = [step.step for step in plan.run.steps]
        for step, ranks, differences in plan.run.violations():
            found += differences
            name = f"step {step.step} of ranks {', '.join(map(str, ranks))}"
            checks.append(_check("executed", differences, where=name))
    data["violations"] = [asdict(violation) for violation in found]
    exit_status = 0 if all(check.ok for check in checks) else 1
    words = [plan.text, *(_line(check) for check in checks), *map(str, found)]
    report = Report("schedule verify", exit=exit_status, checks=tuple(checks), data=data)
    emit(report, json=json, out=out, text="\n".join(words))
    raise typer.Exit(exit_status)


def _check(name: str, violations: Iterable[Violation], *, where: str = "") -> Check:
    broken = [violation for violation in violations if violation.invariant == name]
    found = f"{len(broken)} violations, the first: {broken[0]}" if broken else "none broken"
    return Check(name, not broken, found, "none broken", where)


def _line(check: Check) -> str:
    place = f", {check.where}" if check.where else ""
    return f"{check.name}{place}: {'held' if check.ok else 'BROKEN'}"


def _columns(heads: tuple[str, ...], values: list[list[Number]]) -> Iterator[str]:
    """A line a rank under a line of heads."""
    yield "        " + "".join(f"{head:>14}" for head in heads)
    for rank, row in enumerate(zip(*values, strict=True)):
        yield f"rank {rank:<3}" + "".join(f"{number(value):>14}" for value in row)


def _measured(timeline: Timeline) -> dict[str, Any]:
    work = [sum(span.end - span.start for span in row) for row in timeline.rows]
    idle = [timeline.makespan - busy for busy in work]
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "work": work,
        "idle": idle,
    }


def _drawn(timelines: tuple[Timeline, ...], kind: str, width: int) -> Iterator[str]:
    match kind:
        case "text":
            for timeline in timelines:
                yield f"{draw.text(timeline, width=width)}\n"
        case "svg":
            yield svg.svg(*timelines)
        case _:
            yield json_text.dumps(chrome.trace_events(timelines)) + "\n"
