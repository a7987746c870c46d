"""`pith schedule`: rows, times, pictures and proofs of a plan, a recipe or a run; exit statuses."""

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from pith.cli.app import run
from pith.config import Recipe
from pith.run.trace import TraceFile
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build
from pith.schedule.costs import Costs
from pith.schedule.simulate import Span, simulate
from pith.schedule.table import parse_slot

SIZE = ["--pp", "4", "--micro-batches", "8"]


@pytest.fixture
def ask(capsys):
    """Run `pith schedule ...`: exit status, the JSON report, and the words."""

    def asked(*words):
        status = run(["schedule", *map(str, words), "--json"])
        stdout, stderr = capsys.readouterr()
        report = json.loads(stdout)
        assert (report["exit"], report["ok"]) == (status, status == 0)
        return status, report, stderr

    return asked


@pytest.mark.parametrize("name", [*SCHEDULES, *SIMULATION_ONLY])
def test_every_schedule_is_shown_simulated_and_verified(ask, name):
    table = build(name, pp=4, num_micro_batches=8)
    status, report, words = ask("show", "--schedule", name, *SIZE)
    data = report["data"]
    assert (status, report["verb"]) == (0, "schedule show")
    assert data["rows"] == list(table.row_texts())
    assert (data["num_stages"], data["num_micro_batches"]) == (table.placement.num_stages, 8)
    assert all(row in words for row in data["rows"])

    plan = simulate(table)
    _, report, words = ask("simulate", "--schedule", name, *SIZE)
    data = report["data"]
    assert (data["makespan"], data["bubble"]) == (plan.makespan, plan.bubble)
    assert data["peak_live"] == list(plan.peak_live)
    assert f"time {plan.makespan}, bubble {plan.bubble}" in words

    status, report, _ = ask("verify", "--schedule", name, *SIZE)
    assert status == 0
    assert report["data"]["violations"] == []
    assert len(report["checks"]) > 8


def test_auto_says_what_it_had_to_choose_from(ask):
    _, report, words = ask("simulate", "--schedule", "auto", *SIZE, "--costs", "pair=0.8")
    data = report["data"]
    found = {entry["name"]: entry for entry in data["candidates"]}
    assert {"zbv", "dualpipev", "list", "1f1b"} <= found.keys()
    assert data["makespan"] == min(e["makespan"] for e in data["candidates"] if e["fits"])
    assert all(name in words for name in found)


def test_costs_of_each_stage_and_of_messages_are_taken(ask):
    costs = "f=1:2:3,i=2,w=1:1:4,comm=0.5"
    _, report, _ = ask("simulate", "--schedule", "1f1b", "--pp", 3, "--costs", costs)
    table = build("1f1b", pp=3, num_micro_batches=6)
    expected = simulate(table, Costs(f=(1, 2, 3), i=2, w=(1, 1, 4), comm=0.5))
    assert report["data"]["makespan"] == expected.makespan
    assert report["data"]["work"] == list(expected.work)


def test_a_recipe_is_planned_at_the_costs_of_its_layers(ask):
    recipe = Recipe.load("qwen3-30b-a3b", ["parallel.pp=4"])
    pipeline = recipe.pipeline()
    _, report, _ = ask("simulate", "qwen3-30b-a3b", "--set", "parallel.pp=4")
    assert report["data"]["schedule"] == pipeline.table.name
    expected = simulate(pipeline.table, pipeline.costs)
    assert report["data"]["makespan"] == expected.makespan


@pytest.mark.parametrize("kind", ["text", "svg", "trace"])
def test_a_picture_goes_to_stdout_or_to_a_file(kind, capsys, tmp_path, ask):
    words = ["draw", "--schedule", "zbv", *SIZE, "--format", kind]
    assert run(["schedule", *words]) == 0
    picture = capsys.readouterr().out
    file = tmp_path / "picture"
    assert run(["schedule", *words, "--out", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert file.read_text() == picture
    _, report, _ = ask(*words)
    assert report["data"]["picture"] == picture
    match kind:
        case "text":
            assert "rank 3" in picture
        case "svg":
            assert ET.fromstring(picture).tag.endswith("svg")
        case _:
            assert json.loads(picture)["traceEvents"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--schedule", "zb-v"], "zbv"),
        (["--pp", "0"], "pp"),
        (["--micro-batches", "-3"], "micro"),
        (["--pp", "200", "--micro-batches", "2000"], "stages"),
        (["--schedule", "zbv", "--virtual", "3"], "virtual"),
        (["--schedule", "chimera", "--pp", "3"], "even"),
        (["--schedule", "auto", "--virtual", "2"], "--virtual"),
        (["--schedule", "1f1b", "--costs", "f=1:2"], "4"),
        (["--costs", "speed=1"], "speed"),
        (["--costs", "f=-1"], "f"),
        (["--costs", "f=nan"], "f"),
        (["--costs", "pair=1:2"], "pair"),
        (["--costs", "f"], "f"),
        (["--costs", "f=1e308"], "1e+09"),
        (["--costs", "w=1e-320"], "1e-06"),
        (["--schedule", ""], "''"),
        (["--pp", "1", "--micro-batches", "9000"], "10,000"),
        (["--out", f"{__file__}/x"], "cannot be written"),
        (["--costs", "f=1,f=2"], "two values"),
        (["--max-live", "0"], "--max-live"),
        (["--max-live", "nan"], "--max-live"),
        (["--max-live", "1"], "1"),
        (["tiny-moe", "--pp", "2"], "--pp"),
        (["--set", "parallel.pp=2"], "--set"),
        (["nothing-like-this"], "nothing-like-this"),
        (["--trace", "/nowhere"], "/nowhere"),
        (["--trace", "/nowhere", "--pp", "2"], "--pp"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_wrong_request_is_one_line_that_names_it(ask, verb, words, named):
    status, report, text = ask(verb, *words)
    assert status == 2
    assert named in str(report["error"])
    assert text.startswith("error: ")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "costs", ["comm=1e9", "layers=1e9", "f=1e9,i=1e-6", "pair=0", "f=0,i=0,w=0"]
)
@pytest.mark.parametrize("kind", ["text", "svg", "trace"])
def test_the_widest_costs_are_drawn_at_once_and_not_at_any_size(ask, costs, kind):
    words = ["draw", "--schedule", "dualpipev", *SIZE, "--costs", costs, "--format", kind]
    status, report, _ = ask(*words)
    assert status == 0
    assert len(report["data"]["picture"]) < 300_000


def test_a_bound_that_is_met_but_for_rounding_holds(ask):
    words = ["--schedule", "list", "--costs", "activation=0.1,w_store=0.1", "--max-live", "0.3"]
    assert ask("verify", *words)[0] == 0


def test_a_width_is_for_texts(ask):
    assert ask("draw", *SIZE, "--format", "svg", "--width", "80")[0] == 2


SETTINGS = ["parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipev"]


@pytest.fixture
def run_dir(tmp_path):
    """A folder as a run of four ranks leaves it, its spans as planned."""
    recipe = Recipe.load("tiny-moe", SETTINGS, 4)
    (tmp_path / "config.toml").write_text(recipe.to_toml())
    (tmp_path / "environment.json").write_text(json.dumps({"world_size": 4}))
    pipeline = recipe.pipeline(4)
    plan = simulate(pipeline.table, pipeline.costs)
    for rank in range(4):
        file = TraceFile(tmp_path / "trace", rank, 4)
        file.clear()
        row = plan.rows[recipe.mesh(4).coordinates(rank).pp]
        for step in (1, 3):
            spans = [replace(s, start=s.start * 1e-6, end=s.end * 2e-6) for s in row]
            file.append(step, clock="host", spans=spans)
    return tmp_path


def test_a_run_that_equals_its_table_is_verified_timed_and_drawn(ask, run_dir):
    status, report, _ = ask("verify", "--trace", run_dir)
    assert status == 0
    assert report["data"]["steps"] == [1, 3]
    executed = [check["where"] for check in report["checks"] if check["name"] == "executed"]
    assert executed == [f"step {step} of ranks {r}" for step in (1, 3) for r in ("0, 2", "1, 3")]

    measured = ask("simulate", "--trace", run_dir)[1]["data"]["measured"]
    assert measured["step"] == 3
    assert measured["makespan"] == pytest.approx(max(measured["work"]) + measured["bubble"])

    _, report, _ = ask("draw", "--trace", run_dir, "--format", "trace")
    events = json.loads(report["data"]["picture"])["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.partition(" ")[0] for name in names] == ["planned", "measured"]
    _, report, _ = ask("draw", "--trace", run_dir, "--format", "svg")
    assert len(ET.fromstring(report["data"]["picture"])) == 2


def swap(slots):
    return [slots[1], slots[0], *slots[2:]]


def tear(slots):
    at = next(n for n, (text, *_) in enumerate(slots) if "|" in text)
    text, start, end = slots[at]
    return [*slots[:at], *([part, start, end] for part in text.split("|")), *slots[at + 1 :]]


@pytest.mark.parametrize(
    "change",
    [swap, tear, lambda s: s[:-1], lambda s: [*s, s[-1]], lambda s: []],
    ids=["swapped", "torn", "short", "long", "empty"],
)
def test_a_run_that_ran_anything_else_fails(ask, run_dir, change):
    path = run_dir / "trace" / "rank-00002.jsonl"
    first, last = map(json.loads, path.read_text().splitlines())
    last["slots"] = change(last["slots"])
    path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    status, report, text = ask("verify", "--trace", run_dir)
    assert status == 1
    (violation,) = report["data"]["violations"]
    assert (violation["invariant"], violation["rank"]) == ("executed", 1)
    assert "BROKEN" in text
    failed = [check["where"] for check in report["checks"] if not check["ok"]]
    assert failed == ["step 3 of ranks 0, 2"]


@pytest.mark.parametrize("text", ["F99.0", "F1.0", "F0.999"])
def test_what_no_rank_of_the_plan_runs_is_not_drawn_but_told(ask, run_dir, text):
    path = run_dir / "trace" / "rank-00000.jsonl"
    first, last = map(json.loads, path.read_text().splitlines())
    last["slots"][0][0] = text
    path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    for verb in ("draw", "simulate"):
        status, report, _ = ask(verb, "--trace", run_dir)
        assert status == 2
        assert report["error"]["found"] == f"{text} on rank 0"
        assert report["next"] == [f"pith schedule verify --trace {run_dir}"]
    assert ask("verify", "--trace", run_dir)[0] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", None),
        ("environment.json", None),
        ("environment.json", "{}"),
        ("environment.json", '{"world_size": "4"}'),
        ("environment.json", '{"world_size": 8}'),
        ("trace/rank-00001.jsonl", None),
        ("trace/rank-00000.jsonl", ""),
    ],
)
def test_a_run_with_anything_missing_is_refused(ask, run_dir, name, content):
    path = run_dir / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    status, report, _ = ask("verify", "--trace", run_dir)
    assert status == 2
    assert report["error"]["found"]


def test_slots_of_a_trace_are_those_of_the_table(run_dir):
    line = json.loads((run_dir / "trace" / "rank-00000.jsonl").read_text().splitlines()[0])
    assert all(isinstance(Span(parse_slot(text), s, e), Span) for text, s, e in line["slots"])
