"""`pith compare`: whether two runs are the same run, as far as their precision and order can say.

JSON data: first_difference {step, quantity, a, b, relative} (the earliest beyond the tolerance),
first_unequal (the earliest of other bits), max_relative {loss, grad_norm, ...}, steps_compared,
speed_ratio and memory_ratio (B by A), tolerance, why, weights, recipe_differences, runs, html.
"""

import math
from pathlib import Path
from typing import Annotated

import typer

from pith.cli.output import check_out, conclude, failure_to, refuse_same, write_whole
from pith.cli.recipe import Json, Out
from pith.report import Report

VERB = "compare"
Reordered = Annotated[bool, typer.Option("--reordered", help="A change alters the order of sums.")]


def _ratio(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:  # such a bound would always hold
        raise typer.BadParameter(f"{value:g} is no ratio above 0")
    return value


MinSpeed = Annotated[
    float | None,
    typer.Option(callback=_ratio, help="The least tokens per second of B by those of A."),
]
MaxMemory = Annotated[
    float | None, typer.Option(callback=_ratio, help="The most peak memory of B by that of A.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with the curves to this file.")
]


def compare_command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The run folder to compare to.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The run folder in question.")],
    *,
    reordered: Reordered = False,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Leave the final tensors out.")
    ] = False,
    min_speed: MinSpeed = None,
    max_memory: MaxMemory = None,
    html: Html = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Compare two runs step by step; exit 1 where they differ, or where either is not whole."""
    check_out(out)
    check_out(html, option="--html")
    with failure_to(out, verb=VERB):
        refuse_same(out, html)
        # These load torch, which other commands do without.
        from pith.verify import telling  # noqa: PLC0415
        from pith.verify.compare import compare, cost_checks  # noqa: PLC0415
        from pith.verify.record import read_run  # noqa: PLC0415

        first, second = read_run(run_a, label="A"), read_run(run_b, label="B")
        found = compare(first, second, reordered=reordered, weights=not no_weights)
        bounds = cost_checks(found, min_speed=min_speed, max_memory=max_memory)
        checks = (*found.checks, *bounds)
        if html is not None:
            write_whole(html, text=telling.html(found, checks), option="--html")
        data = {**found.data, "html": str(html) if html else None}
        text = telling.text(found)
    conclude(Report.of_checks(VERB, checks, data=data), json=json, out=out, text=text)
