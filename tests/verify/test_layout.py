"""Layouts as text: what is read, what is refused, and on which recipes they run."""

import pytest

from pith.config import Recipe, shipped
from pith.config.scaled import scaled_down
from pith.errors import RequestError
from pith.verify.layout import Layout, default_layouts, parse_layouts, runnable


def small(name: str = "tiny-moe") -> Recipe:
    return scaled_down(Recipe.load(name))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("pp=2,ep=2,dp=1,schedule=zbv,num_stages=4", Layout(2, 2, 1, None, "zbv", 4)),
        ("ep=4, exchange=splits", Layout(ep=4, exchange="splits")),
        ("dp=2,dp_shard=1,micro_batch_size=1", Layout(dp=2, dp_shard=1, micro_batch_size=1)),
        ("cp=1", Layout()),
    ],
)
def test_a_layout_is_read_and_written(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout
    assert Layout.parse(str(layout)) == layout
    assert layout.world_size == layout.pp * layout.ep * layout.dp


@pytest.mark.parametrize(
    ("text", "found", "nearest"),
    [
        ("", "''", "pp=2"),
        ("pp", "'pp'", "pp=2"),
        ("pp=2,,ep=2", "''", "pp=2"),
        ("p=2", "an unknown key 'p'", "pp"),
        ("shard=1", "an unknown key 'shard'", "dp_shard"),
        ("pp=2,pp=4", "pp twice", ""),
        ("pp=0", "pp=0", "1"),
        ("ep=-2", "ep=-2", "1"),
        ("ep=two", "ep=two", "1"),
        ("dp=²", "dp=²", "1"),
        ("dp=1.5", "dp=1.5", "1"),
        ("pp=999999999999999999999", "pp=999999999999999999999", "1"),
        ("pp=8,ep=8,dp=2", "128 ranks", ""),
        ("cp=2", "cp=2", "1"),
        ("schedule=zvb", "schedule=zvb", "zbv"),
        ("schedule=dualpipe", "schedule=dualpipe", "dualpipev"),
        ("exchange=split", "exchange=split", "splits"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_nearest(text: str, found: str, nearest: str) -> None:
    with pytest.raises(RequestError) as caught:
        Layout.parse(text)
    (fault,) = [fault for fault in caught.value.faults if fault.found == found]
    assert nearest in fault.nearest or not nearest
    assert repr(text) in fault.where


def test_all_faults_of_all_layouts_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        parse_layouts(["pp=2", "pp=x,cp=2,zz=1", "schedule=what", "ep=1,pp=2"])
    assert len(caught.value.faults) == 5
    assert str(caught.value.faults[-1]) == "--layouts pp=2: found given twice, wanted given once"
    with pytest.raises(RequestError, match="nothing"):
        parse_layouts([])
    with pytest.raises(RequestError) as caught:
        runnable(small(), parse_layouts(["ep=3", "pp=8", "pp=2", "pp=2,schedule=zbv,num_stages=6"]))
    places = [fault.where for fault in caught.value.faults]
    assert [place.partition(": ")[0] for place in places] == [
        "--layouts ep=3",
        "--layouts pp=8",
        "--layouts pp=2,schedule=zbv,num_stages=6",
    ]
    assert places[0].endswith("parallel.ep")


def test_all_layouts_take_one_global_batch_with_enough_micro_batches() -> None:
    layouts = parse_layouts(["pp=2,ep=2", "dp=3", "micro_batch_size=2"])
    recipes = runnable(small(), layouts)
    (size,) = {recipe.training.global_batch_size for recipe in recipes}
    for layout, recipe in zip(layouts, recipes, strict=True):
        batch = recipe.batch(layout.world_size)
        assert batch.num_micro_batches >= 2 * layout.pp
        assert batch.global_batch_size == size


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_has_layouts_of_its_own_kind(name: str) -> None:
    recipe = small(name)
    layouts = default_layouts(recipe)
    assert len(layouts) == len(set(layouts)) >= 7
    assert all(layout.world_size <= 4 for layout in layouts)
    assert {layout.pp for layout in layouts} == {1, 2} == {layout.dp for layout in layouts}
    assert any(layout.dp_shard == 1 for layout in layouts)
    has_experts = recipe.architecture.num_experts > 0
    assert any(layout.ep == 2 for layout in layouts) == has_experts
    assert len(runnable(recipe, layouts)) == len(layouts)
    assert {"pp=2,ep=2,schedule=dualpipev"} <= set(map(str, layouts)) or not has_experts
