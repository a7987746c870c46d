"""The one table: which row two runs are held against, why, and that its page says the same."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pith.verify.order import differing_order
from pith.verify.record import Run, read_run
from pith.verify.tolerance import MEAN_STEPS, PRECISIONS, TABLE, Tolerance, tolerance_for

EQUAL, FLOAT64, FLOAT32, BFLOAT16, FLOAT8 = TABLE
PAGE = Path(__file__).parents[2] / "docs" / "comparing.md"


@pytest.mark.parametrize(
    ("first", "second", "same_order", "row"),
    [
        ("float32", "float32", True, EQUAL),
        ("float64", "float64", True, EQUAL),
        ("float32", "float32", False, FLOAT32),
        ("float64", "float64", False, FLOAT64),
        ("float64", "float32", True, FLOAT32),
        ("bfloat16", "bfloat16", True, BFLOAT16),
        ("float32", "bfloat16", False, BFLOAT16),
        ("float8", "bfloat16", True, FLOAT8),
    ],
)
def test_precision_and_order_choose_the_row(
    first: str, second: str, same_order: bool, row: Tolerance
) -> None:
    assert tolerance_for(first, second, same_order=same_order) == row
    assert tolerance_for(second, first, same_order=same_order) == row


def test_a_lower_precision_allows_more_loss_and_none_allows_everything() -> None:
    rows = [tolerance_for(name, name, same_order=False) for name in PRECISIONS]

    assert all(higher.loss < lower.loss for higher, lower in itertools.pairwise(rows))
    assert all(0 < row.loss <= 0.01 for row in rows)
    assert [row.loss for row in rows[1:]] == [1e-5, 5e-3, 0.01]
    assert BFLOAT16.grad_norm == 0.05


def test_the_page_holds_the_table_of_the_code() -> None:
    def cell(figure: float | None, row: Tolerance, *, is_loss: bool = False) -> str:
        mean = f" (mean of the last {MEAN_STEPS})" if is_loss and row.mean_loss else ""
        return "any" if figure is None else f"{figure:g}{mean}"

    wanted = [
        [
            row.name,
            cell(row.loss, row, is_loss=True),
            *(cell(figure, row) for figure in (row.grad_norm, row.balance, row.load, row.weights)),
        ]
        for row in TABLE
    ]
    table = re.search(r"\| row \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None
    rows = [line.strip("|\n ").split("|") for line in table[1].splitlines()]

    assert [[text.strip() for text in row] for row in rows] == wanted


def _with_recipe(run: Run, section: str, **changes: object) -> Run:
    table = getattr(run.recipe, section).model_copy(update=changes)
    return replace(run, recipe=run.recipe.model_copy(update={section: table}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "cuda"}, "device cpu against cuda"),
        ({"machine": "arm64"}, "machine"),
        ({"torch": "2.11.0"}, "torch"),
        ({"variables": {"OMP_NUM_THREADS": "2"}}, "threads 1 against 2"),
        ({"variables": {}}, "threads 1 against those of"),
        ({"world_size": 2}, "dp 1 against 2"),
    ],
)
def test_what_the_environment_says_of_the_order_of_sums_counts(
    plain: Path, changes: dict[str, Any], told: str
) -> None:
    run = read_run(plain, label="A")
    other = replace(run, environment={**run.environment, **changes})

    assert differing_order(run, run) == ()
    assert differing_order(run, other)[0].startswith(told)


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("parallel", {"ep": 2}, "ep 1 against 2"),
        ("parallel", {"cp": 2}, "cp 1 against 2"),
        ("training", {"micro_batch_size": 2}, "micro_batch_size 1 against 2"),
        ("training", {"global_batch_size": 8}, "global_batch_size 4 against 8"),
        ("parallel", {"pp": 2}, "layers of each rank 0-1 against "),
    ],
)
def test_what_the_recipe_says_of_the_order_of_sums_counts(
    plain: Path, section: str, changes: dict[str, object], told: str
) -> None:
    run = read_run(plain, label="A")
    ranks = {**run.environment, "world_size": 2 if {"ep", "cp", "pp"} & changes.keys() else 1}
    other = replace(_with_recipe(run, section, **changes), environment=ranks)

    assert any(line.startswith(told) for line in differing_order(run, other))


def test_other_operators_add_in_another_order(plain: Path) -> None:
    run = read_run(plain, label="A")
    recipe = run.recipe.model_copy(update={"operators": {"linear": "reference"}})

    assert "operators" in differing_order(run, replace(run, recipe=recipe))[0]


def test_a_schedule_with_the_layers_on_the_same_ranks_keeps_the_order(plain: Path) -> None:
    run = read_run(plain, label="A")
    ranks = replace(run, environment={**run.environment, "world_size": 2})

    def on(schedule: str) -> Run:
        return _with_recipe(ranks, "parallel", pp=2, schedule=schedule)

    assert differing_order(on("gpipe"), on("1f1b")) == ()
    assert differing_order(on("gpipe"), on("dualpipev")) != ()


def test_two_runs_on_gpus_are_never_held_to_equal_bits(plain: Path) -> None:
    run = read_run(plain, label="A")
    other = replace(run, environment={**run.environment, "device": "cuda"})

    assert differing_order(other, other) == ("device cuda",)
