"""Whatever placement, costs and bound: a list schedule is valid, fits, and is close to the best."""

import random
from dataclasses import replace

import pytest

from pith.errors import RequestError
from pith.schedule.costs import Costs
from pith.schedule.list_scheduler import least_live, list_schedule, usual_live
from pith.schedule.simulate import simulate
from pith.schedule.table import Kind, Placement
from pith.schedule.verify import verify
from tests.schedule.optima import CASES, PLACES, list_makespan, optima


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_every_list_schedule_holds_within_its_usual_bound(style, virtual):
    for pp in (1, 2, 3, 8):
        for count in (1, 3, 2 * pp + 1):
            place = Placement(style, pp, virtual * pp)
            for costs in (Costs(), Costs(f=2, i=3, w=1, comm=1, pair=0.8)):
                table = list_schedule(place, num_micro_batches=count, costs=costs)
                bound = usual_live(place, costs)
                assert verify(table, costs=costs, max_live=bound) == (), (pp, count, costs)


def test_both_ends_can_be_fed():
    for pp, count in ((2, 2), (4, 8), (6, 12)):
        place = Placement("bidirectional", pp, pp, count)
        assert verify(list_schedule(place, num_micro_batches=count, costs=Costs())) == ()


def random_costs(chance: random.Random, num_stages: int) -> Costs:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.randint(low, high) for _ in range(num_stages))

    held = each(0, 5)
    return Costs(
        f=each(0, 9),
        i=each(0, 9),
        w=each(0, 9),
        comm=chance.choice([0, 1, 20]),
        activation=held,
        w_store=tuple(chance.randint(0, part) for part in held),
        layers=each(0, 4),
        pair=chance.choice([1, 0.9, 0.5, 1.5]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_bound_that_one_micro_batch_fits_is_kept_and_ends(seed):
    chance = random.Random(seed)
    pp, virtual, count = chance.randint(1, 5), chance.randint(1, 3), chance.randint(1, 7)
    place = Placement(chance.choice(["loop", "v"]), pp, virtual * pp)
    costs = random_costs(chance, virtual * pp)
    bound = least_live(place, costs) * chance.choice([1, 1, 1.3, 2, 5])
    table = list_schedule(place, num_micro_batches=count, costs=costs, max_live=bound)
    assert verify(table, costs=costs, max_live=bound * (1 + 1e-9)) == ()


def test_less_than_one_micro_batch_is_refused_with_the_least():
    place = Placement("v", 3, 6)
    with pytest.raises(RequestError, match="2 or more") as caught:
        list_schedule(place, num_micro_batches=4, costs=Costs(), max_live=1)
    assert caught.value.faults[0].nearest == ("2",)


def test_costs_of_other_stages_are_refused():
    with pytest.raises(RequestError, match="4: one a stage"):
        list_schedule(Placement("v", 2, 4), num_micro_batches=2, costs=Costs(f=(1, 2)))


def test_without_a_gain_nothing_is_paired():
    place = Placement("v", 2, 4)
    for pair, wanted in ((1, False), (1.2, False), (0.7, True)):
        table = list_schedule(place, num_micro_batches=6, costs=Costs(pair=pair))
        assert any(len(slot) > 1 for row in table.rows for slot in row) == wanted


@pytest.mark.parametrize("name", PLACES)
def test_a_list_schedule_is_close_to_the_best_on_its_placement(name):
    for n, case in list(enumerate(CASES))[::19]:
        if (best := optima()[name][n]) is not None:
            assert best * (1 - 1e-6) <= list_makespan(case, PLACES[name]) <= best * 1.05, case


@pytest.mark.parametrize(
    ("pp", "count", "pair", "efficiency"),
    [(2, 2, 0.85, 0.905), (4, 2, 0.85, 0.566), (4, 4, 0.85, 0.864), (8, 8, 0.85, 0.834)],
)
def test_a_short_step_is_as_efficient_as_is_known(pp, count, pair, efficiency):
    costs = Costs(f=10, i=12, w=8, comm=0.2, pair=pair)
    table = list_schedule(Placement("v", pp, 2 * pp), num_micro_batches=count, costs=costs)
    assert simulate(table, costs).efficiency > efficiency - 0.001


def test_a_table_tells_its_name_and_has_split_backwards():
    table = list_schedule(Placement("loop", 2, 2), num_micro_batches=3, costs=Costs())
    assert (table.name, table.num_micro_batches) == ("list", 3)
    kinds = {op.kind for row in table.rows for slot in row for op in slot}
    assert kinds == {Kind.F, Kind.I, Kind.W}
    assert replace(table) == list_schedule(
        Placement("loop", 2, 2), num_micro_batches=3, costs=Costs()
    )
