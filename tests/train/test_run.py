"""`pith train` from its command line to its run folder, on a micro recipe and several layouts."""

import hashlib
import json
import math
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.checkpoint.store import read_whole
from pith.config import Recipe
from pith.run.trace import read_trace
from pith.schedule.table import slot_text
from pith.train.initial import fill
from pith.train.step import PHASES

REPORT_KEYS = {"schema", "verb", "ok", "exit", "checks", "data", "error", "next", "env"}
DATA_KEYS = {
    *("recipe", "layout", "world_size", "schedule", "steps", "first_loss", "last_loss"),
    *("validation_loss", "tokens_per_second", "run_dir", "checkpoint"),
    *("operators", "exchange", "routing"),
}
FINITE_KEYS = {
    *("step", "loss", "balance_loss", "z_loss", "grad_norm", "lr", "tokens", "step_seconds"),
    *("tokens_per_second", "memory_bytes"),
}
ABSENT_ON_CPU = {"mfu_causal", "mfu_full"}
SPREAD = {"parallel.ep": 2}  # on pp 2: four processes, the layout of tiny-moe as it ships
OTHERS: dict[str, tuple[int, dict[str, object]]] = {  # processes and settings
    "dp 2": (2, {"parallel.pp": 1}),
    "dp 4, hsdp": (4, {"parallel.pp": 1, "parallel.dp_shard": 2}),
    "dp 2, ep 2, splits": (4, {"parallel.pp": 1, **SPREAD, "parallel.exchange": "splits"}),
}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run_dir) if "event" not in line]


def losses(run_dir: Path) -> list[str]:
    return [line["loss"].hex() for line in steps(run_dir)]


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of every file below `folder`."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The model alone, by canonical name."""
    tensors = read_whole(checkpoint)
    return {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def first(command: Any) -> Any:
    run = command.train("--json", "--out=report.json", settings=SPREAD, prefix=("-m", "pith.cli"))
    assert run.status == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def anew(command: Any, first: Any) -> Any:
    """The same command in the same place, which is not to go on."""
    before = contents(first.run_dir)
    run = command.train("--json", "--resume=never", settings=SPREAD, cwd=first.cwd)
    assert run.status == 0, run.stderr
    assert contents(Path(first.data["run_dir"])) == before
    return run


@pytest.fixture(scope="module")
def run_dir(first: Any) -> Path:
    return Path(first.data["run_dir"])


@pytest.fixture(scope="module")
def alone(command: Any) -> Any:
    """The same training in one process, its weights in a folder of their own."""
    run = command.train(
        "--json",
        settings={
            "parallel.pp": 1,
            "checkpoint.directory": "kept/here",
            "log.trace_steps": [1, 2, 9],
        },
        cores=1,
    )
    assert run.status == 0, run.stderr
    return run


def test_stdout_is_one_report_with_the_promised_keys(first: Any) -> None:
    assert first.stdout.endswith("}\n")
    assert first.stdout.count("\n") == 1
    report = json.loads(first.stdout)
    assert set(report) == REPORT_KEYS
    assert (report["verb"], report["ok"], report["exit"], report["error"]) == (
        "train",
        True,
        0,
        None,
    )
    assert all(check["ok"] for check in report["checks"])
    data = report["data"]
    assert set(data) >= DATA_KEYS
    assert (data["recipe"], data["steps"], data["world_size"]) == ("tiny-moe", 4, 4)
    assert data["layout"] == {"pp": 2, "dp": 1, "cp": 1, "ep": 2}
    assert (data["exchange"], data["routing"]) == ("collectives", "learned")
    assert first.survivors == []


def test_out_holds_what_stdout_held(first: Any) -> None:
    assert (first.cwd / "report.json").read_text() == first.stdout


def test_the_loss_starts_at_an_even_guess_and_falls_on_repeated_data(first: Any) -> None:
    data = first.data
    assert data["first_loss"] == pytest.approx(math.log(264), abs=0.2)
    assert data["last_loss"] < data["first_loss"] - 0.5
    assert data["validation_loss"] == pytest.approx(data["last_loss"], abs=0.2)


def test_every_step_has_finite_metrics_and_the_report_repeats_them(
    first: Any, run_dir: Path
) -> None:
    lines = steps(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(line) >= FINITE_KEYS | ABSENT_ON_CPU | {"communication_seconds", "expert_load"}
        assert all(math.isfinite(line[key]) for key in FINITE_KEYS)
        assert all(line[key] is None for key in ABSENT_ON_CPU)
        waits = line["communication_seconds"]
        assert waits.keys() == set(PHASES)
        assert all(seconds > 0 for phase, seconds in waits.items() if phase != "balance")
        assert sum(waits.values()) < line["step_seconds"] + 1
        assert line["tokens"] == 8 * 32
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
        # Each of the 4 layers routes each token to 2 experts.
        loads = line["expert_load"]
        assert {layer: sum(load) for layer, load in loads.items()} == dict.fromkeys(
            "0123", 2 * line["tokens"]
        )
    data = first.data
    assert (lines[0]["loss"], lines[-1]["loss"]) == (data["first_loss"], data["last_loss"])
    (validation,) = (line for line in metrics(run_dir) if line.get("event") == "validation")
    assert validation["validation_loss"] == data["validation_loss"]


def test_the_folder_says_what_was_run_and_with_what(run_dir: Path, command: Any) -> None:
    assert Recipe.load(run_dir / "config.toml") == command.recipe(SPREAD)
    environment = json.loads((run_dir / "environment.json").read_text())
    assert (environment["world_size"], environment["device"]) == (4, "cpu")
    assert environment["torch"] == torch.__version__
    assert {"python", "commit", "diff_sha256", "devices"} <= set(environment)
    assert not (run_dir / "failures").exists()


def test_what_every_rank_ran_is_its_row_of_the_table(run_dir: Path, command: Any) -> None:
    recipe = command.recipe(SPREAD)
    rows = recipe.table(4).row_texts()
    assert any("|" in row for row in rows), "some slots should be pairs"
    own = tuple(rows[recipe.mesh(4).coordinates(rank).pp] for rank in range(4))
    traced = read_trace(run_dir / "trace")
    assert [(step.step, step.clock) for step in traced] == [(1, "host"), (3, "host")]
    for step in traced:
        assert tuple(" ".join(slot_text(span.slot) for span in row) for row in step.rows) == own
        (seconds,) = (s["step_seconds"] for s in steps(run_dir) if s["step"] == step.step)
        assert all(0 < row[0].start < row[-1].end < seconds for row in step.rows)


def traced_steps(run_dir: Path) -> list[int]:
    return [traced.step for traced in read_trace(run_dir / "trace")]


def test_the_steps_that_are_traced_count_from_where_a_process_starts(
    command: Any, alone: Any
) -> None:
    assert traced_steps(alone.run_dir) == [1, 2]
    cwd = command.folder()
    shutil.copytree(alone.cwd, cwd, dirs_exist_ok=True)
    settings = {"parallel.pp": 1, "checkpoint.directory": "kept/here", "training.steps": 7}
    run = command.train("--json", settings=settings | {"log.trace_steps": [3, 2]}, cwd=cwd)
    assert run.status == 0, run.stderr
    assert traced_steps(run.run_dir) == [6, 7]


def test_the_saved_weights_lie_in_the_run_folder(first: Any, run_dir: Path) -> None:
    assert Path(first.data["checkpoint"]).parent == run_dir / "checkpoints"


def test_the_same_command_again_says_that_it_is_finished_and_changes_nothing(
    command: Any, first: Any, run_dir: Path
) -> None:
    before = contents(run_dir)
    again = command.train("--json", settings=SPREAD, cwd=first.cwd)

    assert again.status == 0, again.stderr
    assert again.stderr.startswith(f"run folder {run_dir}: this run is finished\n")
    assert "step 1" not in again.stderr
    assert again.data == first.data
    assert contents(run_dir) | {"lock": before["lock"]} == before
    assert again.seconds < 10


def test_a_run_that_does_not_go_on_has_a_folder_of_its_own(anew: Any, run_dir: Path) -> None:
    assert anew.data["run_dir"] == f"{run_dir}-2"
    assert anew.data["run_dir"] in anew.stderr.splitlines()[0]
    assert contents(Path(anew.data["run_dir"])).keys() == contents(run_dir).keys()


def test_the_same_seed_gives_the_same_bits(anew: Any, first: Any) -> None:
    assert losses(Path(anew.data["run_dir"])) == losses(Path(first.data["run_dir"]))
    assert anew.data["validation_loss"].hex() == first.data["validation_loss"].hex()
    one, two = (read_whole(Path(run.data["checkpoint"])) for run in (first, anew))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def initial_weights(recipe: Recipe) -> dict[str, Tensor]:
    """By name, in the shapes that the architecture gives them."""
    weights = {spec.name: torch.empty(spec.shape) for spec in recipe.architecture.parameters()}
    for spec in recipe.architecture.parameters():
        fill(weights[spec.name], spec, seed=recipe.training.seed)
    return weights


def assert_same_weights(
    found: dict[str, Tensor], wanted: dict[str, Tensor], *, start: dict[str, Tensor]
) -> None:
    """Whole, moved, and as near to the wanted ones as float32 lets training come."""
    assert found.keys() == start.keys()
    for name, initial in start.items():
        assert found[name].shape == initial.shape, name
        error, way = (float((found[name] - x).norm()) for x in (wanted[name], initial))
        assert way > 0, f"{name} has not moved"
        assert error <= 1e-3 * way, f"{name} is off by {error} after a way of {way}"


@pytest.mark.parametrize("layout", ["pp 2, ep 2", *OTHERS])
def test_every_layout_learns_as_one_process_and_leaves_the_same_whole_weights(
    command: Any, first: Any, alone: Any, layout: str
) -> None:
    run = first
    if layout in OTHERS:
        num_processes, settings = OTHERS[layout]
        run = command.train("--json", f"--nproc={num_processes}", settings=settings)
        assert run.status == 0, run.stderr
        assert run.data["world_size"] == num_processes
        assert run.data["exchange"] == settings.get("parallel.exchange", "local")
        assert f"--nproc {num_processes}" in json.loads(run.stdout)["next"][-1]
    assert alone.data["world_size"] == 1
    own = steps(Path(run.data["run_dir"]))
    assert own[0]["loss"] == pytest.approx(steps(alone.run_dir)[0]["loss"], rel=1e-6)
    for one, other in zip(steps(alone.run_dir), own, strict=True):
        for key, tolerance in {"loss": 1e-5, "balance_loss": 1e-5, "grad_norm": 1e-4}.items():
            assert other[key] == pytest.approx(one[key], rel=tolerance), (one["step"], key)

    weights = weights_of(Path(run.data["checkpoint"]))
    wanted = weights_of(alone.cwd / alone.data["checkpoint"])
    assert_same_weights(weights, wanted, start=initial_weights(command.recipe()))


def test_weights_put_together_wrongly_would_be_seen(command: Any, alone: Any) -> None:
    wanted = weights_of(alone.cwd / alone.data["checkpoint"])
    start = initial_weights(command.recipe())
    assert_same_weights(wanted, wanted, start=start)
    experts = next(name for name in wanted if ".experts." in name)
    rows = len(wanted[experts])
    wrong = {
        "ranks in another order": wanted[experts].roll(rows // 2, 0),
        "one rank's part twice": wanted[experts][: rows // 2].repeat(2, 1, 1),
        "one rank's part alone": wanted[experts][: rows // 2],
        "a part that no rank trained": torch.cat([wanted[experts][:-1], start[experts][-1:]]),
        "never trained": start[experts],
        "nothing": wanted[experts] * math.nan,
    }
    for tensor in wrong.values():
        with pytest.raises(AssertionError, match=r"experts"):
            assert_same_weights(wanted | {experts: tensor}, wanted, start=start)


def test_weights_go_where_checkpoint_directory_says(alone: Any) -> None:
    folder = alone.cwd / "kept" / "here" / "step-00000004"
    assert alone.cwd / alone.data["checkpoint"] == folder
    assert weights_of(folder)
    assert not (alone.run_dir / "checkpoints").exists()


def test_the_processes_of_a_slurm_step_are_joined(command: Any, first: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        shared = {
            "SLURM_NTASKS": "2",
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_ID": "7",
            "MASTER_PORT": str(probe.getsockname()[1]),
        }
    cwd = command.folder()
    started = [
        command.start_train(
            "--json",
            settings={"log.trace_steps": []},
            cwd=cwd,
            variables={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    runs = [process.finish() for process in started]

    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[1].stdout == ""
    assert runs[0].data["first_loss"] == pytest.approx(first.data["first_loss"], rel=1e-6)
    assert Path(runs[0].data["run_dir"]) == runs[0].run_dir
    assert not (runs[0].run_dir / "trace").exists(), "no step was to be traced"


@pytest.mark.parametrize(
    ("place", "named"),
    [
        pytest.param("file/below", "/file: ", id="below a file"),
        pytest.param("file", "/file: ", id="a file"),
        pytest.param("/proc/run", "/proc/run: ", id="where nothing is made"),
        pytest.param(300 * "n", 300 * "n" + ": ", id="too long a name"),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_one_line_and_exit_2(
    command: Any, place: str, named: str
) -> None:
    cwd = command.folder()
    (cwd / "file").write_text("mine")
    run = command.train("--run-dir", place, cwd=cwd)

    assert run.status == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert named + "the run folder cannot be made" in line
    assert [path.name for path in cwd.iterdir()] == ["file"]
    assert (cwd / "file").read_text() == "mine"
