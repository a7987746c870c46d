"""A run gets a folder of its own and says what it was made with, without secrets."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pith.errors import RequestError
from pith.run.environment import code_version
from pith.run.folder import RunFolder

TOML = '[model]\nconfig = "tiny-moe é"\n'


def created(directory: Path) -> RunFolder:
    return RunFolder.create(directory, "tiny-moe", recipe_toml=TOML)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ("git", "-C", str(folder), *identity, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_first_run_has_the_plain_name(tmp_path):
    run = created(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "tiny-moe"
    assert run.notice == ""
    assert (run.path / "config.toml").read_text(encoding="utf-8") == TOML


def test_later_runs_are_numbered_say_so_and_leave_the_earlier_alone(tmp_path):
    first = created(tmp_path)
    first.metrics.write_text("mine\n")
    second, third = created(tmp_path), created(tmp_path)
    assert [run.path.name for run in (second, third)] == ["tiny-moe-2", "tiny-moe-3"]
    assert str(first.path) in second.notice
    assert str(second.path) in second.notice
    assert first.metrics.read_text() == "mine\n"
    assert not second.metrics.exists()


def test_runs_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: created(tmp_path), range(8)))
    assert len({run.path for run in runs}) == 8


def test_the_environment_names_code_versions_and_devices(tmp_path):
    run = RunFolder.create(tmp_path, "x", recipe_toml=TOML, facts={"world_size": 2})
    found = json.loads((run.path / "environment.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["world_size"] == 2
    assert len(found["devices"]) >= torch.cuda.device_count()
    assert {"pith", "python", "commit", "diff_sha256", "cpu_count"} <= found.keys()


def test_no_environment_variable_but_the_listed_ones_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = created(tmp_path)
    text = "".join(path.read_text() for path in run.path.iterdir())
    assert "canary-7f3a" not in text
    variables = json.loads((run.path / "environment.json").read_text())["variables"]
    assert variables == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RequestError, match=r"runs.*cannot be made"):
        created(tmp_path / "runs")


def test_making_a_run_folder_imports_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pith.run.folder import RunFolder;"
        "RunFolder.create(Path(sys.argv[1]), 'x', recipe_toml='');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run((sys.executable, "-c", code, str(tmp_path)), check=False).returncode == 0
    assert (tmp_path / "x" / "environment.json").is_file()


def test_a_clean_checkout_is_its_commit(checkout):
    wanted = {"commit": git(checkout, "rev-parse", "HEAD"), "diff_sha256": None}
    assert code_version(checkout) == wanted


def test_changed_and_new_files_each_change_the_hash(checkout):
    hashes = [code_version(checkout)["diff_sha256"]]
    for name, text in (("code.py", "a = 2\n"), ("new.py", "b = 1\n"), ("new.py", "b = 2\n")):
        (checkout / name).write_text(text)
        hashes.append(code_version(checkout)["diff_sha256"])
    assert len(set(hashes)) == 4
    assert code_version(checkout)["diff_sha256"] == hashes[-1]


def test_a_folder_inside_another_checkout_has_no_commit_of_its_own(checkout):
    (checkout / "site-packages").mkdir()
    nothing = {"commit": None, "diff_sha256": None}
    assert code_version(checkout / "site-packages") == nothing
    assert code_version(checkout / "nowhere") == nothing
