"""A run gets a folder of its own, finds it again, and is the only one that writes there."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from pith.disk import replacing
from pith.errors import RequestError, RunFailedError
from pith.run import folder
from pith.run.environment import code_version
from pith.run.folder import RunFolder

TOML = '[model]\nconfig = "tiny-moe é"\n'
FORK = multiprocessing.get_context("fork")


def created(directory: Path, **options) -> RunFolder:
    return RunFolder.create(directory, "tiny-moe", **options)


def described(directory: Path, toml: str = TOML, **facts) -> RunFolder:
    run = created(directory)
    run.describe(toml, facts=facts)
    return run


def found(directory: Path, origin: str | None = None) -> RunFolder | None:
    return RunFolder.find(directory, "tiny-moe", origin=origin)


@contextmanager
def started(function, *arguments):
    """A forked process; killed and reaped at the end."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def is_locked(run: RunFolder) -> bool:
    with (run.path / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


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


def test_the_first_run_has_the_plain_name_and_says_which_run_it_is(tmp_path):
    run = created(tmp_path / "runs", origin="/saved/step-00000004")
    assert run.path == tmp_path / "runs" / "tiny-moe"
    assert run.notice == ""
    said = json.loads((run.path / "run.json").read_text())
    assert said.keys() == {"format", "id", "origin", "created"}
    assert (said["format"], said["id"]) == ("pith/run/1", run.id)
    assert said["origin"] == run.origin == "/saved/step-00000004"
    age = datetime.now(UTC) - datetime.fromisoformat(said["created"])
    assert -2 < age.total_seconds() < 60
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-moe"]


def test_later_runs_are_numbered_say_so_and_leave_the_earlier_alone(tmp_path):
    first = created(tmp_path)
    first.metrics.write_text("mine\n")
    second, third = created(tmp_path), created(tmp_path)
    assert [run.path.name for run in (second, third)] == ["tiny-moe-2", "tiny-moe-3"]
    assert str(first.path) in second.notice
    assert str(second.path) in second.notice
    assert first.metrics.read_text() == "mine\n"
    assert len({run.id for run in (first, second, third)}) == 3


def test_what_others_own_is_never_taken_but_an_empty_folder_is_free(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tiny-moe").symlink_to("elsewhere")
    (tmp_path / "tiny-moe-2").mkdir()
    (tmp_path / "tiny-moe-2" / "thesis").write_text("mine")
    (tmp_path / "tiny-moe-3").mkdir()
    assert created(tmp_path).path.name == "tiny-moe-3"
    assert (tmp_path / "tiny-moe-2" / "thesis").read_text() == "mine"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_runs_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: created(tmp_path), range(8)))
    with FORK.Pool(2) as processes:
        runs += processes.map(created, [tmp_path] * 20, chunksize=1)
    assert len({run.path for run in runs}) == len({run.id for run in runs}) == 28
    assert {path.name for path in tmp_path.iterdir()} == {run.path.name for run in runs}
    assert all(RunFolder.find(tmp_path, r.path.name, origin=None).id == r.id for r in runs)


def _create_for_ever(directory):
    while True:
        created(directory)


def test_a_run_that_is_killed_while_it_is_made_leaves_no_folder_that_is_no_run(tmp_path):
    for trial in range(6):
        (place := tmp_path / str(trial)).mkdir()
        with started(_create_for_ever, place):
            await_file(place / "tiny-moe-2")
            time.sleep(0.003 * trial)
        runs = [path for path in place.iterdir() if not path.name.startswith(".")]
        assert len(runs) >= 2
        assert all(RunFolder.find(place, path.name, origin=None) for path in runs)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("file/x/y", "/file/x: "),
        ("file", "/file: "),
        ("/proc/run", "/proc/run: "),
        (300 * "n", 300 * "n" + ": "),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path, place, named):
    (tmp_path / "file").write_text("a file")
    path = tmp_path / place
    assert RunFolder.find(path.parent, path.name, origin=None) is None
    with pytest.raises(RequestError, match=re.escape(named) + "the run folder cannot be made"):
        RunFolder.create(path.parent, path.name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_same_command_finds_what_it_began(tmp_path):
    assert found(tmp_path) is None
    run = created(tmp_path)
    again = found(tmp_path)
    assert (again.path, again.id, again.origin, again.notice) == (run.path, run.id, None, "")
    created(tmp_path)
    assert found(tmp_path) == run


def test_a_folder_that_is_no_run_is_not_found_whatever_it_is(tmp_path):
    (tmp_path / "tiny-moe").write_text("a file")
    assert found(tmp_path) is None
    (tmp_path / "tiny-moe").unlink()
    (tmp_path / "tiny-moe").mkdir()
    (tmp_path / "tiny-moe" / "metrics.jsonl").write_text("of an older version")
    assert found(tmp_path) is None
    assert created(tmp_path).path.name == "tiny-moe-2"
    assert found(tmp_path) is None


def test_a_branch_is_found_by_its_origin_and_goes_on(tmp_path):
    origins = (None, "/a/step-00000004", "/a/step-00000002", "/a/step-00000004")
    runs = [created(tmp_path, origin=origin) for origin in origins]
    assert found(tmp_path, "/a/step-00000004") == RunFolder(runs[1].path, runs[1].id, origins[1])
    assert found(tmp_path, "/a/step-00000002").path == runs[2].path
    assert found(tmp_path, "/a/step-00000003") is None
    (runs[1].path / "run.json").unlink()  # a foreign folder is passed over, a gap ends the search
    assert found(tmp_path, "/a/step-00000004").path == runs[3].path
    runs[2].path.rename(tmp_path / "moved")
    assert found(tmp_path, "/a/step-00000004") is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"format": "pith/run/1", "id": "00', "EOF"),
        ("", "EOF"),
        ("[]", "object"),
        ("\udcff", "Invalid JSON"),
        ('{"format": "pith/run/1", "id": "", "origin": null, "created": ""}', "id: "),
        ('{"format": "pith/run/1", "origin": null, "created": ""}', "id: "),
        ('{"format": "pith/run/2", "id": "ID", "origin": null, "created": ""}', "format: "),
        ('{"format": "pith/run/1", "id": "ID", "origin": 4, "created": ""}', "origin: "),
        ('{"format": "pith/run/1", "id": "ID/../../x", "origin": null, "created": ""}', "id: "),
    ],
)
def test_a_broken_run_json_is_refused_by_its_name(tmp_path, content, told):
    path = created(tmp_path).path / "run.json"
    created(tmp_path, origin="/a")
    path.write_text(content.replace("ID", 32 * "0"), errors="surrogateescape")
    for origin in (None, "/a"):
        with pytest.raises(RequestError, match=rf"{re.escape(str(path))}: .*{told}"):
            found(tmp_path, origin)


def test_every_cut_of_a_run_json_is_refused(tmp_path):
    path = created(tmp_path).path / "run.json"
    whole = path.read_bytes()
    for size in range(len(whole.rstrip())):
        path.write_bytes(whole[:size])
        with pytest.raises(RequestError):
            found(tmp_path)


def test_a_run_is_described_once_and_what_changes_is_kept(tmp_path):
    run = created(tmp_path)
    assert run.recipe_toml is None
    for toml, num in (("a", 1), ("a", 1), ("b", 1), ("b", 2), ("a", 1)):
        run.describe(toml, facts={"world_size": num})
    assert run.recipe_toml == "a"
    assert [(run.path / f"config-{n}.toml").read_text() for n in (1, 2)] == ["a", "b"]
    names = ["environment.json", *(f"environment-{n}.json" for n in (1, 2))]
    sizes = [json.loads((run.path / name).read_text())["world_size"] for name in names]
    assert sizes == [1, 1, 2]
    kept = ["config-1.toml", "config-2.toml", "config.toml"]
    assert sorted(p.name for p in run.path.iterdir()) == sorted([*kept, *names, "run.json"])


def test_a_description_that_is_killed_half_way_loses_and_repeats_nothing(tmp_path, monkeypatch):
    run = described(tmp_path, "old")
    write = folder.write_durably

    def killed(path, content):
        if path.name == "config.toml":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(folder, "write_durably", killed)
    with pytest.raises(KeyboardInterrupt):
        run.describe("new", facts={})
    assert run.recipe_toml == (run.path / "config-1.toml").read_text() == "old"
    monkeypatch.undo()
    run.describe("new", facts={})
    assert run.recipe_toml == "new"
    assert not (run.path / "config-2.toml").exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"ne", None])
    assert path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_recipe_that_is_no_text_is_one_clear_line(tmp_path):
    run = created(tmp_path)
    (run.path / "config.toml").write_bytes(b"\xff")
    with pytest.raises(RequestError, match=r"config\.toml: .*cannot be read"):
        _ = run.recipe_toml


def test_a_finished_run_says_how_it_ended(tmp_path):
    run = created(tmp_path)
    assert run.read_finished() is None
    run.finish({"steps": 4, "last_loss": float("nan"), "layout": {"pp": 2}})
    assert run.read_finished() == {"steps": 4, "last_loss": None, "layout": {"pp": 2}}
    whole = run.finished.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"[1]", b"\xff", 5000 * b"["):
        run.finished.write_bytes(broken)
        assert run.read_finished() is None
    run.finished.unlink()
    run.finished.mkdir()
    with pytest.raises(RunFailedError, match=r"report\.json: .*cannot be written"):
        run.finish({})


def test_a_folder_that_is_gone_is_one_clear_line(tmp_path):
    run = created(tmp_path)
    run.path.rename(tmp_path / "moved")
    with pytest.raises(RequestError, match=r"tiny-moe: .*No such file"):
        run.describe(TOML, facts={})
    with pytest.raises(RequestError, match=r"lock: .*No such file"), run.lock():
        pass


def test_a_locked_folder_is_refused_with_its_owner_and_free_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_PATIENCE_S", 0.1)
    run = created(tmp_path)
    with run.lock() as notice:
        assert notice == ""
        host, process_id = (run.path / "lock").read_text().splitlines()[0].split()
        assert (host, int(process_id)) == (os.uname().nodename, os.getpid())
        with pytest.raises(RequestError) as raised, run.lock():
            pass
    assert raised.value.code == "run.in_use"
    assert raised.value.exit_status == 2
    assert raised.value.where == str(run.path)
    assert f"process {process_id} on {host}" in raised.value.found
    assert "--resume never" in raised.value.next_step
    with run.lock():
        pass
    (run.path / "lock").write_text("an owner with a longer name than this one, and lines\n" * 9)
    with run.lock():
        assert (run.path / "lock").read_text() == f"{host} {process_id}\n"


def test_the_lock_is_freed_by_an_exception_which_passes_as_it_is(tmp_path):
    run = created(tmp_path)
    with pytest.raises(FileNotFoundError), run.lock():
        raise FileNotFoundError
    assert not is_locked(run)


def _hold(run, sign, seconds):
    with run.lock():
        sign.write_text("")
        time.sleep(seconds)


def test_two_processes_that_lock_at_once_take_turns(tmp_path):
    run = created(tmp_path)

    with started(_hold, run, tmp_path / "a", 0.3), started(_hold, run, tmp_path / "b", 0.3) as last:
        await_file(tmp_path / "a")
        await_file(tmp_path / "b")
        last.join()
        assert last.exitcode == 0
    first, second = sorted((tmp_path / name).stat().st_mtime for name in "ab")
    assert second - first > 0.25


@pytest.mark.parametrize("anew", [False, True])
def test_a_folder_that_went_while_one_waited_for_it_is_not_taken(tmp_path, anew):
    run = created(tmp_path)

    def wait_for_it():
        with (
            pytest.raises(RequestError, match=r"lock: .*(No such file|made meanwhile)"),
            run.lock(),
        ):
            pass

    with ThreadPoolExecutor(1) as pool:
        with run.lock():
            waiting = pool.submit(wait_for_it)
            time.sleep(0.15)
            shutil.rmtree(run.path)
            if anew:
                other = created(tmp_path)
                (other.path / "lock").touch()
        waiting.result()


def test_a_killed_process_frees_the_folder_for_one_that_waits(tmp_path):
    run = created(tmp_path)
    with started(_hold, run, tmp_path / "held", 60) as process:
        await_file(tmp_path / "held")
        assert is_locked(run)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (time.sleep(0.2), process.kill()))
            start = time.monotonic()
            with run.lock():
                assert 0.1 < time.monotonic() - start < folder.LOCK_PATIENCE_S
                assert (run.path / "lock").read_text().split()[1] == str(os.getpid())
        process.join()
        assert process.exitcode == -signal.SIGKILL


def _hold_and_fork(run, sign):
    with run.lock(), started(time.sleep, 60) as child:
        draft = sign.with_suffix(".draft")
        draft.write_text(str(child.pid))
        draft.rename(sign)
        time.sleep(60)


def test_a_rank_that_outlives_its_launcher_keeps_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_PATIENCE_S", 0.1)
    run, sign = created(tmp_path), tmp_path / "forked"
    with started(_hold_and_fork, run, sign) as launcher:
        await_file(sign)
        launcher.kill()
        launcher.join()
        child = int(sign.read_text())
        try:
            with pytest.raises(RequestError, match="run writes to this folder"), run.lock():
                pass
        finally:
            os.kill(child, signal.SIGKILL)
    monkeypatch.undo()
    with run.lock():
        pass


def test_the_end_of_the_block_does_not_unlock_it_for_a_forked_rank(tmp_path):
    run = created(tmp_path)
    with run.lock():
        child = FORK.Process(target=time.sleep, args=(60,))
        child.start()
    assert is_locked(run)
    child.kill()
    child.join()
    assert not is_locked(run)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_lock_is_told_and_not_refused(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    run = created(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with run.lock() as notice:
        assert str(run.path) in notice


def test_any_other_trouble_with_the_lock_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run = created(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RequestError, match=r"lock: .*Input/output error"), run.lock():
        pass


def test_making_a_run_folder_imports_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; import pith.run.metrics, pith.config.changes;"
        "from pith.run.folder import RunFolder;"
        "run = RunFolder.create(Path(sys.argv[1]), 'x'); run.describe('', facts={});"
        "run.lock().__enter__(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run((sys.executable, "-c", code, str(tmp_path)), check=False).returncode == 0
    assert (tmp_path / "x" / "environment.json").is_file()


def test_the_environment_names_code_versions_and_devices(tmp_path):
    run = described(tmp_path, world_size=2)
    said = json.loads((run.path / "environment.json").read_text())
    assert said["torch"] == torch.__version__
    assert said["numpy"] == np.__version__
    assert said["world_size"] == 2
    assert len(said["devices"]) >= torch.cuda.device_count()
    assert {"pith", "python", "commit", "diff_sha256", "cpu_count"} <= said.keys()


def test_no_environment_variable_but_the_listed_ones_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = described(tmp_path)
    run.finish({"ok": True})
    text = "".join(path.read_text() for path in run.path.iterdir())
    assert "canary-7f3a" not in text
    variables = json.loads((run.path / "environment.json").read_text())["variables"]
    assert variables == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}


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
