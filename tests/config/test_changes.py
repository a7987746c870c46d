"""What may change when a run goes on is announced; what makes it another run is refused."""

import json
import random
from copy import deepcopy

import pytest

from pith.config import Recipe, shipped
from pith.config.changes import FIXED, Change, changes, refuse_fixed, text
from pith.errors import RequestError


def resolved(*overrides, name="tiny-moe"):
    return Recipe.load(name, overrides).model_dump(mode="json")


def between(*overrides):
    return changes(resolved(), resolved(*overrides))


def leaves(table, *above):
    """Every path of keys to a value, and the value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *above, key)
        else:
            yield (*above, key), value


def put(table, path, value):
    for key in path[:-1]:
        table = table.setdefault(key, {})
    table[path[-1]] = value


def take(table, path):
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_does_not_differ_from_what_a_manifest_holds_of_it(name):
    recipe = resolved(name=name)
    assert changes(json.loads(json.dumps(recipe)), recipe) == ()


def test_random_edits_are_found_one_by_one():
    choose = random.Random(0)
    before = resolved(name="qwen3-30b-a3b")
    places = dict(leaves(before))
    for _ in range(100):
        after, wanted = deepcopy(before), set()
        for path in choose.sample(sorted(places), choose.randrange(6)):
            value = choose.choice(["absent", -1, None, True, [], "a.b"])
            if choose.random() < 0.3:
                take(after, path)
                value = "absent"
            else:
                put(after, path, value)
                if value == places[path] and type(value) is type(places[path]):
                    continue
            wanted.add((".".join(path), repr(places[path]), repr(value)))
        if choose.random() < 0.5:
            put(after, ("model", "fields", "new", "key"), 1)
            wanted.add(("model.fields.new.key", "'absent'", "1"))
        found = changes(before, after)
        plain = {(c.name.removesuffix(" (path)"), repr(c.before), repr(c.after)) for c in found}
        assert plain == wanted
        assert len(found) == len(wanted)
        assert {(c.name, repr(c.after), repr(c.before)) for c in found} == {
            (c.name, repr(c.before), repr(c.after)) for c in changes(after, before)
        }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b 1 -> 2"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a [1, 2] -> [1, 3]"]),
        ({"a": 0.001}, {"a": 0.0005}, ["a 0.001 -> 0.0005"]),
        ({}, {"a": "absent"}, ["a absent -> absent"]),
        ({"a": None}, {}, ["a None -> absent"]),
        ({"a": {"b": 1, "c": {"d": 2}}}, {}, ["a.b 1 -> absent", "a.c.d 2 -> absent"]),
        ({"a": {}}, {}, ["a {} -> absent"]),
        ({"a": {}}, {"a": {"b": None}}, ["a.b absent -> None"]),
        ({"a": None}, {"a": {"b": 1}}, ["a None -> {'b': 1}"]),
        ({"a": True}, {"a": 1}, ["a True -> 1"]),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": {"b": 1}, "c": 2}, {"c": 2, "a": {"b": 1}}, []),
        ({"a": 200 * "x"}, {"a": "y"}, [f"a '{79 * 'x'}... (202 characters) -> 'y'"]),
    ],
)
def test_each_kind_of_difference_is_told_in_a_line(before, after, told):
    assert [text(change) for change in changes(before, after)] == told


def test_what_may_change_is_announced():
    announced = refuse_fixed(
        between(
            "optimizer.lr=0.0005",
            "optimizer.schedule=wsd",
            "optimizer.decay_steps=20",
            "training.steps=70",
            "training.global_batch_size=32",
            "parallel.exchange=splits",
            "parallel.ep=1",
            "checkpoint.every=3",
            "data.corpus=/moved/corpus",
        ),
        allowed=(),
        where="c",
    )
    lines = [text(change) for change in announced]
    assert "optimizer.lr 0.002 -> 0.0005" in lines
    assert "optimizer.schedule 'cosine' -> 'wsd'" in lines
    assert "data.corpus (path) 'embedded' -> '/moved/corpus'" in lines
    assert len(lines) == 9
    assert refuse_fixed((), allowed=(), where="c") == ()


FIXED_CHANGES = {
    "model.fields.hidden_size": ("model.fields.hidden_size=256", "256"),
    "training.seed": ("training.seed=5", "5"),
    "training.sequence_length": ("training.sequence_length=64", "64"),
    "data.seed": ("data.seed=9", "9"),
    "data.validation": ("data.validation=0.25", "0.25"),
    "data.packing": ("data.packing=none", "'none'"),
}


@pytest.mark.parametrize("name", FIXED_CHANGES)
def test_what_makes_it_another_run_is_refused_with_both_values_unless_allowed(name):
    override, shown = FIXED_CHANGES[name]
    before = resolved("data.packing=mask")
    after = resolved("data.packing=mask", override, "optimizer.lr=0.25")
    section, *keys = name.split(".")
    value = before[section]
    for key in keys:
        value = value[key]
    found = changes(before, after)

    with pytest.raises(RequestError) as raised:
        refuse_fixed(found, allowed=(), where="runs/x/step-00000004")
    (fault,) = raised.value.faults
    assert (fault.where, fault.found, fault.wanted) == (name, shown, repr(value))
    assert raised.value.code == "resume.changed"
    assert str(raised.value).startswith(
        f"runs/x/step-00000004: this run cannot go on with another {name}"
    )
    assert "--allow-change" in raised.value.next_step

    assert refuse_fixed(found, allowed=(name,), where="c") == found
    assert len(found) == 2


def test_all_fixed_changes_are_told_at_once_and_each_needs_its_own_name():
    overrides = [override for override, _ in FIXED_CHANGES.values()]
    extra = (Change("data.corpus", "aaaa", "bbbb"), Change("data.tokenizer", "bytes", "gpt2"))
    optimizer = Change("optimizer.name", "adamw", "muon")
    found = (*changes(resolved("data.packing=mask"), resolved(*overrides)), *extra, optimizer)
    names = {*FIXED_CHANGES, "data.corpus", "data.tokenizer", "optimizer.name"}

    with pytest.raises(RequestError, match=r"another .* and 6 more") as raised:
        refuse_fixed(found, allowed=(), where="c")
    assert {fault.where for fault in raised.value.faults} == names
    for name in names:
        with pytest.raises(RequestError) as raised:
            refuse_fixed(found, allowed=tuple(names - {name}), where="c")
        assert [fault.where for fault in raised.value.faults] == [name]
    assert refuse_fixed(found, allowed=FIXED, where="c") == found


def test_the_content_of_a_corpus_is_fixed_and_its_place_is_not():
    moved = between("data.corpus=/moved/corpus")
    assert refuse_fixed(moved, allowed=(), where="c") == moved
    with pytest.raises(RequestError) as raised:
        refuse_fixed((*moved, Change("data.corpus", "aaaa", "bbbb")), allowed=(), where="c")
    (fault,) = raised.value.faults
    assert (fault.where, fault.found, fault.wanted) == ("data.corpus", "'bbbb'", "'aaaa'")


def test_a_name_allows_what_lies_below_it_and_no_neighbour():
    found = (
        Change("model.fields.rope.factor", 1, 2),
        Change("model.fields.rope_theta", 1, 2),
    )
    assert refuse_fixed(found, allowed=("model.fields",), where="c") == found
    with pytest.raises(RequestError) as raised:
        refuse_fixed(found, allowed=("model.fields.rope",), where="c")
    assert [fault.where for fault in raised.value.faults] == ["model.fields.rope_theta"]


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("training.sed", "training.seed"),
        ("seed", "data.seed"),
        ("model", "model.fields"),
        ("model.hidden_size", "model.fields.hidden_size"),
        ("data", "data.seed"),
        ("data.corpus (path)", "data.corpus"),
        ("optimizer.lr", "optimizer.name"),
        ("", "model.fields"),
        ("training.seedling", "training.seed"),
    ],
)
def test_an_allowed_name_that_is_not_fixed_is_refused_with_the_nearest(typo, nearest):
    sound = between("optimizer.lr=0.25")
    with pytest.raises(RequestError) as raised:
        refuse_fixed(sound, allowed=(typo, "data.seed"), where="c")
    (fault,) = raised.value.faults
    assert (fault.where, fault.found) == ("--allow-change", repr(typo))

    wrong = between("model.fields.hidden_size=256")
    with pytest.raises(RequestError) as raised:
        refuse_fixed(wrong, allowed=(typo,), where="c")
    change, fault = raised.value.faults
    assert change.where == "model.fields.hidden_size"
    assert nearest in fault.nearest


def test_long_values_are_shortened():
    found = (Change("model.fields.note", "a", 300 * "b"),)
    with pytest.raises(RequestError) as raised:
        refuse_fixed(found, allowed=(), where="c")
    (fault,) = raised.value.faults
    assert fault.found.endswith("... (302 characters)")
    assert len(fault.found) < 110
