"""The pipeline of a run: its table, the layers of each stage, and what the stages cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from pith.arch import Architecture
from pith.plan.placement import split_layers
from pith.schedule.auto import Choice, auto
from pith.schedule.build import build, placement
from pith.schedule.costs import Costs
from pith.schedule.table import Placement, Table

# Stage costs are whole numbers, so that sums are exact: so many for the forward of a mean layer.
LAYER_UNITS = 1000

_Times = tuple[int, int, int]  # F, I, W


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
        split = self.split(place)
        layers, first, last = self._times()
        times = [[sum(layers[n][part] for n in held) for part in range(3)] for held in split]
        times[0] = list(map(add, times[0], first))
        times[-1] = list(map(add, times[-1], last))
        f, i, w = (tuple(part) for part in zip(*times, strict=True))
        sizes = tuple(map(len, split))
        return Costs(f=f, i=i, w=w, activation=sizes, w_store=sizes, layers=sizes, pair=pair)

    def _times(self) -> tuple[list[_Times], _Times, _Times]:
        """F, I and W of each layer, of the embedding and of the head, rounded before they are
        added up: however it is cut, the model takes the same time."""
        model, length = self.model, self.sequence_length
        whole, products = model.layer_costs(length), model.layer_costs(0)
        unit = sum(whole) / len(whole) / 3 / LAYER_UNITS

        def times(weights: float, attention: float = 0.0) -> _Times:
            third, part = weights / 3, attention / 3
            return (
                round((third + part) / unit),
                round((third + 2 * part) / unit),
                round(third / unit),
            )

        layers = [times(p, total - p) for total, p in zip(whole, products, strict=True)]
        return layers, times(model.embedding_cost(length)), times(model.head_cost(length))


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
