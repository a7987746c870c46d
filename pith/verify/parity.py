"""Layout parity: the same steps on every layout of ranks as in one process.

A layout is structure: which rank holds what, what moves between ranks, what is summed where and in
which order things run. So everything is computed in float64 with the operators that serve it, where
a difference of structure stands out from rounding by many orders of magnitude; how kernels compute
in lower precision is compared elsewhere. What a layout finds goes through the production trainer
on real processes; what it should find is `pith.verify.one_piece`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from pith.config import Recipe
from pith.launch.devices import DeviceChoice
from pith.report import Check
from pith.verify.layout import Layout, default_layouts, parse_layouts, runnable
from pith.verify.layout_case import LayoutCase
from pith.verify.plain_steps import NUM_STEPS, PlainSteps

__all__ = ["Layout", "Parity", "check_layouts", "default_layouts", "parse_layouts"]


@dataclass(frozen=True, slots=True)
class Parity:
    """What was checked, and figures of each layout."""

    checks: tuple[Check, ...]
    data: dict[str, Any]


def check_layouts(
    recipe: Recipe,
    layouts: Sequence[Layout],
    *,
    device: DeviceChoice,
    say: Callable[[str], None],
) -> Parity:
    """Two steps of `recipe` on each of `layouts`, compared with the same in one process.

    Global batch (random tokens, unevenly masked labels), weights and seed are the same for all.
    Of the recipe everything counts but precision, operators, the course of the learning rate and
    the sizes of the batch. `say` gets a line for each layout. Raises RequestError with all faults
    of all layouts before any process starts, UnavailableError where `device` does not serve.
    """
    assert layouts, "nothing to check"
    recipes = runnable(_structure(recipe), layouts)
    reference = PlainSteps(recipes[0], recipes[0].training.global_batch_size)
    checks: list[Check] = []
    figures: dict[str, dict[str, Any]] = {}
    for layout, own in zip(layouts, recipes, strict=True):
        start = monotonic()
        case = LayoutCase(layout, reference.clipping(own), reference)
        found = case.check(device)
        checks += found.checks
        figures[str(layout)] = found.figures | {"seconds": round(monotonic() - start, 3)}
        first = found.figures["first_difference"]
        say(f"{layout}: {'equal' if first is None else first}")
    return Parity(tuple(checks), _summary(figures))


def _structure(recipe: Recipe) -> Recipe:
    """What of `recipe` a layout can change, in float64, with a rate that differs from step to
    step."""
    raw = recipe.model_dump(mode="json")
    raw["operators"] = {}
    raw["training"] |= {"precision": "float64", "steps": NUM_STEPS}
    raw["optimizer"] |= {
        "schedule": "constant",
        "warmup_steps": NUM_STEPS,
        "decay_steps": 0,
        "decay_shape": "linear",
        "min_lr_ratio": 0.0,
    }
    # Axes and batch are the layout's to give: as for one rank until then.
    raw["parallel"] |= {"pp": 1, "ep": 1, "cp": 1, "dp_shard": None, "num_stages": None}
    raw["parallel"] |= {"layers_per_stage": None}
    raw["training"] |= {"global_batch_size": recipe.training.micro_batch_size}
    return Recipe.model_validate(raw)


def _summary(figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of each layout, and over all of them."""
    differing = [f for f in figures.values() if f["first_difference"] is not None]

    def worst(name: str) -> float:
        return max(float(f["max_relative"].get(name, inf)) for f in figures.values())

    return {
        "layouts": dict(figures),
        "first_difference": differing[0]["first_difference"] if differing else None,
        "max_relative": {name: worst(name) for name in ("loss", "grad_norm")},
        "steps_compared": min(f["steps"] for f in figures.values()),
    }
