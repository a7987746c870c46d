"""The pipeline of a run: its table, the layers of each stage, and what the stages cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from pith.arch import Architecture
from pith.plan.placement import split_layers
from pith.schedule.auto import Choice, auto
from pith.schedule.build import build, placement
from pith.schedule.costs import Costs
from pith.schedule.table import Placement, Table

# Stage costs are whole numbers, so that sums are exact: so many for the forward of a mean layer.
LAYER_UNITS = 1000


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What all ranks do. `choice` says how "auto" came to the table; None for a named schedule."""

    table: Table
    split: tuple[range, ...]
    costs: Costs
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts a model into the stages of any placement. `explicit` gives the lengths instead."""

    model: Architecture
    sequence_length: int
    explicit: Sequence[int] | None = None

    def split(self, place: Placement) -> tuple[range, ...]:
        """Which layers each stage holds."""
        model, length = self.model, self.sequence_length
        return split_layers(
            model.layer_costs(length),
            num_stages=place.num_stages,
            first_cost=model.embedding_cost(length),
            last_cost=model.head_cost(length),
            folded=place.style == "v" and place.num_stages == 2 * place.pp,
            explicit=self.explicit,
        )

    def costs(self, place: Placement, *, pair: float) -> Costs:
        """Times in thousandths of a mean layer's forward, activations in layers.

        A matrix product with weights takes as long in F as in I and in W; attention between
        tokens, which has no weights, takes twice as long in I as in F and nothing in W. A FLOP of
        one counts as much as one of the other.
        """
        model, length, split = self.model, self.sequence_length, self.split(place)
        whole, weights = model.layer_costs(length), model.layer_costs(0)
        thirds = [sum(weights[layer] for layer in held) / 3 for held in split]
        thirds[0] += model.embedding_cost(length) / 3
        thirds[-1] += model.head_cost(length) / 3
        attention = [sum(whole[n] - weights[n] for n in held) / 3 for held in split]
        unit = sum(whole) / len(whole) / 3 / LAYER_UNITS
        sizes = tuple(map(len, split))
        return Costs(
            f=tuple(round((t + a) / unit) for t, a in zip(thirds, attention, strict=True)),
            i=tuple(round((t + 2 * a) / unit) for t, a in zip(thirds, attention, strict=True)),
            w=tuple(round(t / unit) for t in thirds),
            activation=sizes,
            w_store=sizes,
            layers=sizes,
            pair=pair,
        )


def plan_pipeline(
    schedule: str,
    *,
    pp: int,
    num_micro_batches: int,
    num_stages: int | None,
    cutter: Cutter,
    pair: float,
    most_stages: int,
) -> Pipeline:
    """The pipeline of `schedule`, "auto" included, with `num_stages` where that is given.

    `pair` is the time of an overlapped pair in parts of the sum of its two operations; auto takes
    none with more than `most_stages`. Raises RequestError for numbers that the schedule cannot
    have.
    """
    if schedule == "auto":
        choice = auto(
            pp,
            num_micro_batches=num_micro_batches,
            costs=lambda place: cutter.costs(place, pair=pair),
            num_stages=num_stages,
            most_stages=most_stages,
        )
        table = choice.table
        return Pipeline(table, cutter.split(table.placement), choice.costs, choice)
    virtual = None if num_stages is None else num_stages // pp
    place = placement(schedule, pp=pp, virtual=virtual)
    costs = cutter.costs(place, pair=pair)
    table = build(
        schedule, pp=pp, num_micro_batches=num_micro_batches, virtual=virtual, costs=costs
    )
    return Pipeline(table, cutter.split(place), costs)
