"""`pith train` up to the point where processes start: plans, refusals, and what is chosen."""

import json
import os
import subprocess
import sys

import pytest

from pith.cli.app import run


def report_of(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def alone_in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_reports_the_plan_and_makes_nothing(capsys, tmp_path):
    assert run(["train", "qwen3-30b-a3b", "--dry-run", "--json"]) == 0

    stdout, stderr = capsys.readouterr()
    report = json.loads(stdout)
    assert report["verb"] == "train"
    assert report["data"]["layout"] == {"pp": 2, "dp": 1, "cp": 1, "ep": 4}
    assert "dualpipev" in stderr
    assert list(tmp_path.iterdir()) == []


def test_nproc_and_an_outer_launcher_set_the_world_of_the_plan(monkeypatch, capsys):
    assert run(["train", "--dry-run", "--json", "--nproc", "8"]) == 0
    assert report_of(capsys)["data"]["layout"]["dp"] == 2

    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NODELIST", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run(["train", "--dry-run", "--json"]) == 0
    assert report_of(capsys)["data"]["layout"]["dp"] == 4

    assert run(["train", "--dry-run", "--nproc", "2"]) == 2
    assert "another number of ranks; found --nproc 2; wanted 16" in capsys.readouterr().err


def test_a_layout_that_cannot_be_trained_yet_is_refused_with_the_plan_as_next_step(capsys):
    assert run(["train", "--set", "parallel.cp=2"]) == 2

    stderr = capsys.readouterr().err
    assert "parallel.cp: found 2" in stderr
    assert "parallel.ep" not in stderr
    assert "--dry-run" in stderr
    assert run(["train", "--set", "parallel.cp=2", "--dry-run"]) == 0


IMPOSSIBLE = {
    "parallel.pp=0": "parallel.pp",
    "parallel.schedule=zigzag": "parallel.schedule",
    "parallel.ep=3": "parallel.ep",
    "training.global_batch_size=7": "training.global_batch_size",
    "training.steps=0": "training.steps",
    "training.precision=float7": "training.precision",
    "training.sequence_length=1000000": "training.sequence_length",
    "optimizer.lr=-1": "optimizer.lr",
    "optimizer.decay_steps=1000": "optimizer.decay_steps",
    "nonsense.key=1": "nonsense",
}


@pytest.mark.parametrize(("override", "field"), IMPOSSIBLE.items())
def test_an_impossible_recipe_is_exit_2_and_names_the_field(capsys, tmp_path, override, field):
    assert run(["train", "--set", override]) == 2

    stderr = capsys.readouterr().err
    assert f"  {field}: found " in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_all_impossible_values_are_named_at_once_before_torch_is_imported(tmp_path):
    # Values that other rules read are left out: what cannot be read is not judged further.
    overrides = [o for o in IMPOSSIBLE if o.partition("=")[0] not in ("parallel.pp", "parallel.ep")]
    args = ["train", *(word for override in overrides for word in ("--set", override))]
    code = f"import sys\nfrom pith.cli.app import run\nassert run({args}) == 2\n"
    code += "assert 'torch' not in sys.modules"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    named = {line.strip().partition(":")[0] for line in done.stderr.splitlines()[1:]}
    assert {"parallel.schedule", "training.steps", "optimizer.lr", "nonsense"} <= named
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--device", "cuda"], 3, "too few GPUs"),
        (["--device", "cpu", "--backend", "nccl"], 2, "NCCL carries CUDA tensors only"),
        (["--inject-fault", "burn:forward:1:3"], 2, "burn:forward:1:3"),
        (["--out", "none/report.json"], 2, "cannot be written"),
    ],
)
def test_what_cannot_run_here_is_refused_before_a_folder_is_made(
    capsys, tmp_path, args, status, words
):
    if status == 3 and os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")

    assert run(["train", *args]) == status

    (line, *_) = capsys.readouterr().err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []
