"""Two runs compared: equal ones pass, and whatever is broken or different fails by its name."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pith.checkpoint.manifest import MANIFEST, decode, encode
from pith.config import Recipe
from pith.report import Check, Report
from pith.verify import telling
from pith.verify.compare import Comparison, compare, cost_checks
from pith.verify.difference import QUANTITIES, moved_share, relative
from pith.verify.record import Run, read_run
from pith.verify.tolerance import BFLOAT16, EQUAL_BITS, FLOAT8, FLOAT32

Edit = Callable[[Path, Callable[[list[dict[str, Any]]], object]], None]
CHECKPOINT = Path("checkpoints") / "step-00000006"


def compared(a: Path, b: Path, **how: Any) -> Comparison:
    return compare(read_run(a, label="A"), read_run(b, label="B"), **how)


def failed(comparison: Comparison) -> dict[str, Check]:
    return {check.name: check for check in comparison.checks if not check.ok}


def set_value(step: int, key: str, value: object) -> Callable[[list[dict[str, Any]]], None]:
    return lambda steps: steps[step - 1].update({key: value})


def test_a_run_and_its_copy_are_equal_in_every_bit(plain: Path, twin: Path) -> None:
    found = compared(plain, twin)

    assert failed(found) == {}
    assert found.tolerance == EQUAL_BITS
    assert found.first_difference is None
    assert found.first_unequal is None
    assert found.data["max_relative"]["loss"] == found.data["max_relative"]["grad_norm"] == 0
    assert found.steps_compared == 6
    assert found.speed_ratio == found.memory_ratio == 1
    assert found.weights is not None
    # Weights and two moments of: embedding, head, norm, and in 2 layers 4 norms, q k v o, the
    # router and 3 projections of the experts.
    assert len(found.weights.relative) == 3 * (3 + 2 * 12)


def test_another_order_of_sums_is_held_against_its_own_row(real_runs: tuple[Path, Path]) -> None:
    found = compared(*real_runs)

    assert failed(found) == {}
    assert found.tolerance == FLOAT32
    assert "micro_batch_size 1 against 2" in found.why
    assert found.data["recipe_differences"] == {"training.micro_batch_size": [1, 2]}
    assert found.first_difference is None
    assert found.first_unequal is not None, "equal bits would be a comparison of one run"


@pytest.mark.parametrize(
    "quantity", ["loss", "grad_norm", "lr", "balance_loss", "z_loss", "sample_digest"]
)
def test_the_last_bit_of_one_value_is_a_difference_on_a_cpu(
    plain: Path, twin: Path, edit: Edit, quantity: str
) -> None:
    def change(steps: list[dict[str, Any]]) -> None:
        value = steps[3][quantity]
        is_text = isinstance(value, str)
        steps[3][quantity] = value[::-1] if is_text else math.nextafter(value, 9)

    edit(twin, change)
    found = compared(plain, twin, weights=False)

    assert list(failed(found)) == [quantity]
    assert failed(found)[quantity].where == "step 4"
    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.quantity) == (4, quantity)


def test_in_one_step_the_first_quantity_in_causal_order_is_named(
    plain: Path, twin: Path, edit: Edit
) -> None:
    def change(steps: list[dict[str, Any]]) -> None:
        for step in steps[2:]:
            step["loss"] += 0.5
            step["grad_norm"] += 0.5
        steps[2]["lr"] *= 2

    edit(twin, change)
    found = compared(plain, twin)

    assert found.data["first_difference"]["quantity"] == "lr"
    assert found.data["first_difference"]["step"] == 3
    assert found.data["first_difference"]["relative"] == 0.5
    assert set(failed(found)) == {"lr", "loss", "grad_norm", "B finished"}


@pytest.mark.parametrize(("factor", "holds"), [(1 + 5e-6, True), (1 + 2e-5, False)])
def test_reordered_sums_have_the_tolerance_of_the_table_and_no_more(
    plain: Path, twin: Path, edit: Edit, factor: float, holds: bool
) -> None:
    edit(twin, lambda steps: steps[4].update(loss=steps[4]["loss"] * factor))

    strict = compared(plain, twin, weights=False)
    loose = compared(plain, twin, weights=False, reordered=True)

    assert list(failed(strict)) == ["loss"]
    assert list(failed(loose)) == ([] if holds else ["loss"])


NO_NUMBERS = [None, math.nan, math.inf, -math.inf, True, "3.2", [3.2], {}, 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("is_in_both", [False, True])
def test_what_is_no_finite_number_fails_even_in_both_runs(
    plain: Path, twin: Path, edit: Edit, value: object, is_in_both: bool
) -> None:
    edit(twin, set_value(3, "loss", value))
    found = compared(twin if is_in_both else plain, twin, weights=False)

    assert "step 3: loss is " in failed(found)["B values"].found
    assert failed(found)["loss"].where == "step 3"


@pytest.mark.parametrize(
    "name",
    [*QUANTITIES, "tokens_per_second", "memory_bytes", "step_seconds"],
)
@pytest.mark.parametrize("change", ["null", "missing", "a list"])
def test_every_quantity_has_to_be_there(
    plain: Path, twin: Path, edit: Edit, name: str, change: str
) -> None:
    def spoil(steps: list[dict[str, Any]]) -> None:
        del steps[1][name]
        if change != "missing":
            steps[1][name] = None if change == "null" else [1]

    edit(twin, spoil)
    found = compared(plain, twin, weights=False)

    assert f"step 2: {name} is " in failed(found)["B values"].found
    assert name not in QUANTITIES or failed(found)[name].where == "step 2"
    assert set(failed(found)) <= {"B values", name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda steps: steps.pop(2), "step 3 is missing"),
        (lambda steps: steps.__delitem__(slice(1, 4)), "steps 2 to 4 are missing"),
        (lambda steps: steps.__delitem__(slice(4, 6)), "it ends after step 4"),
        (lambda steps: steps.clear(), "no step at all"),
        (lambda steps: steps.insert(3, dict(steps[2])), "step 3 is there 2 times"),
        (lambda steps: steps.append({**steps[5], "step": 7}), "step 7 is none of the run"),
        (
            lambda steps: steps.append({**steps[5], "step": 10**400}),
            f"step {10**19} is none of the run",
        ),
        (lambda steps: steps.insert(0, {**steps[0], "step": 0}), "step 0 is none of the run"),
        (lambda steps: steps.insert(0, steps.pop(4)), "step 1 comes after step 5"),
        (lambda steps: steps[0].update(step=True), "a step is numbered true"),
    ],
)
def test_steps_that_are_not_each_there_once_and_in_order_are_named(
    plain: Path, twin: Path, edit: Edit, change: Any, told: str
) -> None:
    edit(twin, change)

    for baseline in (plain, twin):  # also where both lack the same
        found = failed(compared(baseline, twin, weights=False))
        assert told in found["B steps"].found
        assert ("A steps" in found) == (baseline == twin)


def test_runs_of_unequal_length_differ(plain: Path, twin: Path, edit: Edit) -> None:
    edit(twin, lambda steps: steps.pop())
    found = compared(plain, twin, weights=False)

    assert {"B steps", "length"} <= set(failed(found))
    assert found.data["first_difference"]["step"] == 6
    assert found.data["first_difference"]["b"] == "missing"
    assert found.steps_compared == 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.replace(b'"loss"', b'"loss', 1),
        lambda content: content[:-2],
        lambda content: b"\xff\xfe" + content,
        lambda content: content.replace(b'{"step": 2', b'[{"step": 2', 1),
        lambda content: content.replace(b'"step": 2', b'"step": "2"', 1),
        lambda content: b"",
        None,
    ],
)
def test_metrics_that_are_not_whole_fail(plain: Path, twin: Path, spoil: Any) -> None:
    path = twin / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    if spoil is not None:
        path.write_bytes(spoil(content))
    found = compared(plain, twin, weights=False)

    assert "metrics.jsonl" in failed(found)["B metrics"].found


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ({"device": None}, "device is null"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": "1"}, 'world_size is "1"'),
        ({"torch": ""}, "torch is"),
        ({"variables": [], "cpu_count": None}, "cpu_count is null"),
        (None, "device is missing"),
    ],
)
def test_an_environment_that_does_not_say_the_order_of_sums_fails(
    plain: Path, twin: Path, spoil: dict[str, object] | None, told: str
) -> None:
    path = twin / "environment.json"
    value = {**json.loads(path.read_text()), **(spoil or {})}
    path.write_text(json.dumps(value) if spoil else "{")

    assert told in failed(compared(plain, twin, weights=False))["B environment"].found


def test_a_run_that_did_not_come_to_its_end_fails(plain: Path, twin: Path) -> None:
    report = json.loads((twin / "report.json").read_text())
    for content, told in (
        (None, "no report"),
        ("{", "no report"),
        (json.dumps({**report, "steps": 3}), "a report after step 3"),
        (json.dumps({**report, "validation_loss": 1.0}), "tells of validation loss 1.0"),
    ):
        (twin / "report.json").unlink(missing_ok=True)
        if content is not None:
            (twin / "report.json").write_text(content)

        assert told in failed(compared(plain, twin, weights=False))["B finished"].found


@pytest.mark.parametrize("value", [None, 1.0, "gone"])
def test_another_validation_loss_is_a_difference(plain: Path, twin: Path, value: object) -> None:
    lines = (twin / "metrics.jsonl").read_text().splitlines()
    events = [n for n, line in enumerate(lines) if '"validation_loss"' in line]
    event = {**json.loads(lines[events[0]]), "validation_loss": value}
    lines[events[0]] = json.dumps(event)
    kept = [line for n, line in enumerate(lines) if n != events[0] or value != "gone"]
    (twin / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))

    found = failed(compared(plain, twin, weights=False))

    assert found["validation_loss"].where == "step 3"
    assert ("B values" in found) == (value is None)


def test_another_order_of_the_data_fails_though_all_values_are_near(
    plain: Path, twin: Path, edit: Edit
) -> None:
    edit(twin, lambda steps: steps[1].update(sample_digest="0123456789abcdef"))
    found = compared(plain, twin, weights=False, reordered=True)

    assert list(failed(found)) == ["sample_digest"]
    assert found.data["first_difference"]["step"] == 2


@pytest.mark.parametrize("field", ["corpus", "tokenizer"])
def test_another_corpus_fails_though_all_values_are_equal(
    plain: Path, twin: Path, field: str
) -> None:
    path = twin / CHECKPOINT / MANIFEST
    manifest = decode(path.read_bytes())
    path.write_bytes(encode(manifest.model_copy(update={field: "other"})))

    assert list(failed(compared(plain, twin))) == ["corpus"]


def test_load_may_move_a_little_and_never_change_in_sum() -> None:
    load = {"0": [10, 20, 30, 40], "3": [25, 25, 25, 25]}

    assert moved_share(load, load) == 0
    assert moved_share(load, {**load, "0": [11, 19, 30, 40]}) == 0.01
    assert moved_share(load, {**load, "0": [11, 20, 30, 40]}) == math.inf
    assert moved_share(load, {"0": load["0"]}) == math.inf
    assert moved_share(load, {**load, "0": [10, 20, 70]}) == math.inf
    assert moved_share(load, None) == math.inf


def test_only_equal_bits_are_no_difference() -> None:
    assert relative(0.1, 0.1) == 0
    assert relative(0.0, -0.0) > 0
    assert relative(1.0, 2.0) == relative(2.0, 1.0) == 0.5
    assert relative(0.0, 5e-324) == 1
    assert relative(1e308, -1e308) > 1


def test_speed_leaves_out_the_first_step_of_each_process(
    plain: Path, twin: Path, edit: Edit
) -> None:
    edit(
        twin,
        lambda steps: [
            s.update(tokens_per_second=[1, 90, 1, 70, 80, 100][s["step"] - 1]) for s in steps
        ],
    )
    with (twin / "metrics.jsonl").open("a") as file:
        file.write('{"event": "resumed", "step": 2}\n')
    a = read_run(plain, label="A")
    a = replace(a, steps=tuple({**step, "tokens_per_second": 50.0} for step in a.steps))
    found = compare(a, read_run(twin, label="B"), weights=False)

    assert found.speed_ratio == 85 / 50
    assert [c.ok for c in cost_checks(found, min_speed=1.7, max_memory=None)] == [True]
    assert [c.ok for c in cost_checks(found, min_speed=1.71, max_memory=None)] == [False]


def test_memory_is_the_largest_peak_and_an_unknown_ratio_keeps_no_bound(
    plain: Path, twin: Path, edit: Edit
) -> None:
    a = read_run(plain, label="A")
    peak = max(step["memory_bytes"] for step in a.steps)
    edit(twin, set_value(4, "memory_bytes", 2 * peak))
    found = compare(a, read_run(twin, label="B"), weights=False)

    assert found.memory_ratio == 2
    assert [c.ok for c in cost_checks(found, min_speed=None, max_memory=2)] == [True]
    assert [c.ok for c in cost_checks(found, min_speed=None, max_memory=1.9)] == [False]

    empty = replace(read_run(twin, label="B"), steps=())
    unknown = compare(a, empty, weights=False)
    assert [c.ok for c in cost_checks(unknown, min_speed=0, max_memory=9)] == [False, False]


def _with_precision(run: Run, precision: str) -> Run:
    training = run.recipe.training.model_copy(update={"precision": precision})
    return _with_recipe(run, run.recipe.model_copy(update={"training": training}))


def _with_recipe(run: Run, recipe: Recipe) -> Run:
    """The run as if it had been trained with `recipe`, its checkpoint too."""
    assert run.checkpoint.manifest is not None
    told = {"recipe": recipe.model_dump(mode="json", warnings=False)}
    manifest = run.checkpoint.manifest.model_copy(update=told)
    return replace(run, recipe=recipe, checkpoint=replace(run.checkpoint, manifest=manifest))


@pytest.mark.parametrize(("factor", "is_held"), [(1.009, True), (1.011, False), (math.nan, False)])
def test_float8_is_held_to_the_mean_of_the_last_losses(
    plain: Path, factor: float, is_held: bool
) -> None:
    a = _with_precision(read_run(plain, label="A"), "bfloat16")
    b = _with_precision(replace(a, label="B"), "float8")
    b = replace(b, steps=tuple({**step, "loss": step["loss"] * factor} for step in b.steps))
    found = compare(a, b, weights=False)

    assert found.tolerance == FLOAT8
    assert ("mean_loss" not in failed(found)) == is_held


@pytest.mark.parametrize(("change", "is_held"), [((-5, 5), True), ((-5, 6), False)])
def test_bfloat16_load_may_move_but_its_sum_is_held_equal(
    plain: Path, change: tuple[int, int], is_held: bool
) -> None:
    a = _with_precision(read_run(plain, label="A"), "bfloat16")
    load = a.steps[2]["expert_load"]
    first, second, *rest = load["1"]
    moved = {**load, "1": [first + change[0], second + change[1], *rest]}
    changed = (*a.steps[:2], {**a.steps[2], "expert_load": moved}, *a.steps[3:])
    found = compare(a, replace(a, label="B", steps=changed), weights=False)

    assert found.tolerance == BFLOAT16
    assert list(failed(found)) == ([] if is_held else ["B values", "expert_load"])


def test_a_dense_model_has_no_balance_on_either_side(plain: Path) -> None:
    nothing = {"balance_loss": None, "z_loss": None, "expert_load": {}}
    run = read_run(plain, label="A")
    fields = {**(run.recipe.model.fields or {}), "mlp_only_layers": [0, 1]}
    model = run.recipe.model.model_copy(update={"fields": fields})
    dense = replace(
        _with_recipe(run, run.recipe.model_copy(update={"model": model})),
        steps=tuple({**step, **nothing} for step in run.steps),
    )

    assert failed(compare(dense, replace(dense, label="B"), weights=False)) == {}

    lone = replace(dense, label="B", steps=(*dense.steps[:5], {**dense.steps[5], "z_loss": 1.0}))
    found = failed(compare(dense, lone, weights=False))
    assert list(found) == ["z_loss"]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(10**400), 10**400),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["0", "1", "2"]), st.lists(st.integers(-1, 9), max_size=5)),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(step=st.integers(0, 5), name=st.sampled_from(QUANTITIES), value=VALUES)
@example(step=0, name="loss", value=-0.0)
@example(step=5, name="expert_load", value={"0": [], "1": []})
def test_any_other_value_fails_and_nothing_raises(
    plain: Path, step: int, name: str, value: object
) -> None:
    a = read_run(plain, label="A")
    changed = ({**s, name: value} if n == step else s for n, s in enumerate(a.steps))
    found = compare(a, replace(a, label="B", steps=tuple(changed)), weights=False)

    is_same = type(value) is type(a.steps[step][name]) and value == a.steps[step][name]
    assert bool(failed(found)) != is_same
    report = Report.of_checks("compare", found.checks, data=found.data)
    json.loads(report.json(), parse_constant=pytest.fail)
    assert max(map(len, telling.text(found).splitlines()[8:])) <= 200
    assert telling.html(found, found.checks).endswith("</html>\n")


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    step=st.integers(0, 5),
    quantity=st.sampled_from(["loss", "grad_norm", "balance_loss", "z_loss"]),
    share=st.floats(0.01, 50),
    sign=st.sampled_from([-1, 1]),
)
def test_a_row_of_the_table_fails_exactly_beyond_its_figure(
    plain: Path, step: int, quantity: str, share: float, sign: int
) -> None:
    figures = {"loss": FLOAT32.loss, "grad_norm": FLOAT32.grad_norm}
    limit = figures.get(quantity, FLOAT32.balance) or 0
    a = read_run(plain, label="A")
    value = a.steps[step][quantity] * (1 + sign * share * limit)
    changed = ({**s, quantity: value} if n == step else s for n, s in enumerate(a.steps))
    found = compare(a, replace(a, label="B", steps=tuple(changed)), weights=False, reordered=True)

    if abs(share - 1) > 0.01:
        told = [name for name in failed(found) if name != "B finished"]
        assert told == ([quantity] if share > 1 else [])


def test_a_run_is_not_equal_to_one_whose_checkpoint_is_gone(plain: Path, twin: Path) -> None:
    shutil.rmtree(twin / CHECKPOINT)
    found = failed(compared(plain, twin))

    assert set(found) == {"B checkpoint", "B recipe", "corpus", "weights"}
    assert "step-00000006" in found["B checkpoint"].found


def test_the_checkpoint_of_another_run_is_none_of_this_one(
    real_runs: tuple[Path, Path], twin: Path
) -> None:
    shutil.rmtree(twin / CHECKPOINT)
    shutil.copytree(real_runs[1] / CHECKPOINT, twin / CHECKPOINT)

    assert set(failed(compared(real_runs[0], twin, reordered=True))) == {
        "B checkpoint",
        "B recipe",
    }


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("config.toml", 'precision = "float32"', 'precision = "bfloat16"'),
        ("config.toml", "vocab_size = 264", "vocab_size = 320"),
        ("config.toml", "lr = 0.002", "lr = 0.5"),
        ("environment.json", '"world_size": 1', '"world_size": 2'),
    ],
)
def test_a_run_is_held_against_what_its_checkpoint_was_sealed_with(
    *, plain: Path, twin: Path, file: str, before: str, after: str
) -> None:
    text = (twin / file).read_text()
    assert before in text
    (twin / file).write_text(text.replace(before, after))

    assert "B recipe" in failed(compared(plain, twin, weights=False))


def test_a_key_that_came_after_a_run_is_no_change_of_it_unless_it_is_written_there(
    plain: Path, twin: Path
) -> None:
    place, config = twin / CHECKPOINT / MANIFEST, twin / "config.toml"
    manifest = decode(place.read_bytes())
    log = {name: value for name, value in manifest.recipe["log"].items() if name != "every"}
    recipe = manifest.recipe | {"log": log}
    place.write_bytes(encode(manifest.model_copy(update={"recipe": recipe})))
    assert "B recipe" in failed(compared(plain, twin, weights=False))

    whole = config.read_text()
    config.write_text(re.sub(r"(?<=\[log\]\n)every = .*\n", "", whole))
    assert config.read_text() != whole
    assert failed(compared(plain, twin, weights=False)) == {}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"grad_norm": -5.0}, "B values"),
        ({"loss": -1.0}, "B values"),
        ({"tokens_per_second": 1e300}, "B values"),
        ({"tokens": 1}, "B values"),
        ({"expert_load": {"0": [0] * 4, "1": [0] * 4}}, "B values"),
        ({"samples": 4}, "B steps"),
    ],
)
def test_values_that_contradict_each_other_fail_on_either_side(
    *, twin: Path, edit: Edit, change: dict[str, Any], check: str
) -> None:
    edit(twin, lambda steps: [step.update(change) for step in steps])

    assert {check, check.replace("B", "A")} <= set(failed(compared(twin, twin)))
