"""auto is near the best that there is, and no builder that fits is better."""

import random
from fractions import Fraction

import pytest

from pith.errors import RequestError
from pith.schedule.auto import auto
from pith.schedule.build import SCHEDULES, build, placement
from pith.schedule.costs import Costs
from pith.schedule.simulate import simulate
from pith.schedule.table import Placement
from tests.schedule.exhaustive import Problem, shortest
from tests.schedule.optima import CASES, PLACES, auto_makespan, optima


def test_the_least_makespans_on_file_are_what_an_exhaustive_search_finds():
    sample = [n for n, case in enumerate(CASES) if case.num_micro_batches <= 2][::23]
    for name, place in PLACES.items():
        for n in sample:
            least, told = shortest(CASES[n].problem(place)), optima()[name][n]
            assert told == (None if least is None else pytest.approx(float(least)))


def test_auto_is_within_three_percent_of_the_best_that_two_ranks_can_do():
    """Of a sample; tests/schedule/optima.py goes through all of them."""
    least = optima()
    for n, case in list(enumerate(CASES))[::7]:
        best = min(found for name in ("v", "loop 2") if (found := least[name][n]) is not None)
        assert best * (1 - 1e-6) <= auto_makespan(case) <= best * 1.03, case


def model(chance: random.Random, pp: int) -> dict[int, Costs]:
    """Random costs of one model, cut into pp and into 2 pp stages."""
    f, i, w = chance.choice([(1, 1, 1), (10, 12, 8), (2, 2, 1), (3, 5, 2)])
    head = chance.choice([1, 1, 2, 4])
    scale = [chance.choice([1, 1, 2]) for _ in range(2 * pp - 1)] + [head]
    more = {
        "comm": chance.choice([0, 0, 0.3 * f, 3 * f]),
        "pair": chance.choice([1, 0.9, 0.8, 1.1]),
    }
    halves = [[part * s for s in scale] for part in (f, i, w, 1, 1)]
    wholes = [[a + b for a, b in zip(part[::2], part[1::2], strict=True)] for part in halves]
    kinds = ("f", "i", "w", "activation", "w_store")
    return {
        len(parts[0]): Costs(**dict(zip(kinds, map(tuple, parts), strict=True)), **more)
        for parts in (halves, wholes)
    }


@pytest.mark.parametrize("seed", range(20))
def test_no_builder_that_fits_ends_sooner(seed):
    chance = random.Random(seed)
    pp, count = chance.randint(1, 8), chance.choice([1, 2, 3, 5, 8, 12, 20])
    costs = model(chance, pp)
    plans = []
    for name in SCHEDULES:
        at = costs[placement(name, pp=pp).num_stages]
        plans.append(simulate(build(name, pp=pp, num_micro_batches=count, costs=at), at))
    peaks = sorted(max(plan.peak_live) for plan in plans)
    for bound in (None, peaks[0], chance.choice(peaks)):
        choice = auto(
            pp, num_micro_batches=count, costs=lambda p: costs[p.num_stages], max_live=bound
        )
        assert max(choice.simulation.peak_live) <= choice.max_live * (1 + 1e-9)
        fitting = [p.makespan for p in plans if max(p.peak_live) <= choice.max_live]
        assert choice.simulation.makespan <= min(fitting) * (1 + 1e-9)


def even(place: Placement) -> Costs:
    return Costs().cut(12 // place.num_stages)


def test_the_candidates_say_why():
    choice = auto(3, num_micro_batches=6, costs=even, max_live=14)
    assert {each.name for each in choice.candidates} == set(SCHEDULES)
    for each in choice.candidates:
        assert each.fits == (each.peak_live <= 14)
        if each.fits:
            assert each.makespan >= choice.simulation.makespan
    lines = list(choice.lines())
    assert len(lines) == 1 + len(choice.candidates)
    assert any("too much" in line for line in lines)


def test_of_equals_the_v_is_taken_and_on_one_rank_pairs_over_the_whole_model():
    assert auto(
        1, num_micro_batches=4, costs=lambda p: Costs().cut(2 // p.num_stages)
    ).table.name == ("1f1b-pair")
    assert auto(3, num_micro_batches=12, costs=even).table.name == "zbv"


def test_the_number_of_stages_can_be_set_or_bounded():
    def stages(**limits):
        return auto(3, num_micro_batches=6, costs=even, **limits).table.placement.num_stages

    assert (stages(num_stages=3), stages(num_stages=6), stages(most_stages=5)) == (3, 6, 3)
    for impossible in ({"num_stages": 4}, {"most_stages": 2}):
        with pytest.raises(RequestError, match="3 or 6"):
            stages(**impossible)


def test_a_bound_that_nothing_fits_is_refused_with_the_least_that_works():
    with pytest.raises(RequestError, match=r"found 3, wanted 4 or more") as caught:
        auto(3, num_micro_batches=6, costs=even, max_live=3)
    least = float(caught.value.faults[0].nearest[0])
    assert auto(3, num_micro_batches=6, costs=even, max_live=least)


def test_equal_requests_have_equal_tables():
    def chosen():
        return auto(4, num_micro_batches=5, costs=lambda p: Costs(pair=0.9).cut(8 // p.num_stages))

    assert chosen() == chosen()


@pytest.mark.parametrize("name", ["pp", "num_micro_batches"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(RequestError):
        auto(**{"pp": 2, "num_micro_batches": 2, name: 0}, costs=lambda p: Costs())


@pytest.mark.parametrize(
    ("count", "times", "pair", "comm", "bound"),
    [
        (3, (1, 1, 1), (2, 3), 0, "3"),
        (2, (2, 2, 2), (2, 3), 1, "2.5"),
        (4, (1, 1, 2), (3, 4), 1, "2.5"),
        (2, (3, 1, 2), (1, 2), 2, "2"),
    ],
)
def test_it_is_also_where_input_gradients_free_half_of_what_is_held(
    count, times, pair, comm, bound
):
    place, share, least = PLACES["v"], Fraction(*pair), Fraction(bound)
    half = Fraction(1, 2)
    problem = Problem(
        ranks=tuple(map(place.rank, range(4))),
        num_micro_batches=count,
        comm=(Fraction(comm),) * 4,
        layers=(1,) * 4,
        pair=share,
        bound=least,
        **dict(zip("fiw", ((Fraction(part),) * 4 for part in times), strict=True)),
        activation=(Fraction(1),) * 4,
        w_store=(half,) * 4,
    )
    one = Costs(*times, comm=comm, w_store=0.5, pair=float(share))
    choice = auto(
        2,
        num_micro_batches=count,
        costs=lambda p: one.cut(4 // p.num_stages),
        max_live=float(least),
        num_stages=4,
    )
    assert choice.simulation.makespan <= float(shortest(problem)) * 1.03
