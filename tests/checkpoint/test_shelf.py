"""The folder of a run's checkpoints: only what is complete counts, and nothing of it is lost."""

import errno
import json
import multiprocessing
import os
import shutil
import sys

import pytest

from pith.checkpoint import shelf as module
from pith.checkpoint.manifest import read
from pith.checkpoint.shelf import Shelf, look, name_of, step_of
from pith.errors import RequestError, RunFailedError
from tests.checkpoint.by_hand import begin, leftovers, manifest_of, save

KILLED = 9
WATCHED = ("os.", "shutil.", "open")  # audit events before which a process can be killed


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "my runs" / "größe"


def content(directory):
    """Every path below with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def complete(directory):
    return [found.step for found in Shelf(directory).find() if found.complete]


def killed_at(call, action) -> int:
    """The exit status of a forked process that does `action` and is killed at its n-th `call`."""
    child = os.fork()
    if child == 0:
        left = call

        def hook(event, _):
            nonlocal left
            if event.startswith(WATCHED):
                left -= 1
                if left < 0:
                    os._exit(KILLED)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refusing(real, path, cause):
    """The function `real`, which fails for `path` alone."""

    def call(first, *args, **kwargs):
        if str(first) == str(path):
            raise OSError(cause, os.strerror(cause))
        return real(first, *args, **kwargs)

    return call


def test_a_name_is_a_step_and_a_step_a_name():
    for step in (0, 4, 99_999_999, 123_456_789):
        assert step_of(name_of(step)) == step
    for name in (
        "step-4",
        "step-000000004",
        "step-0000000४",
        "step-00000004\n",
        "step-00000004.tmp",
    ):
        assert step_of(name) is None


def test_the_newest_complete_one_is_found_among_leftovers_which_have_reasons(directory):
    for step in (8, 2, 9):
        save(directory, step)
    reasons = leftovers(directory)
    before = content(directory)

    shelf = Shelf(directory)
    found = shelf.find()

    assert [entry.step for entry in found if entry.complete] == [2, 8, 9]
    assert shelf.newest() == found[2]
    assert found[2].path == directory / "step-00000009"
    assert found[2].manifest == read(found[2].path)
    told = {entry.path.name: "; ".join(map(str, entry.faults)) for entry in found[3:]}
    assert set(told) == set(reasons)
    for name, reason in reasons.items():
        assert reason in told[name], name
    assert content(directory) == before


def test_a_folder_that_is_missing_is_empty_and_one_that_is_none_is_refused(tmp_path):
    assert Shelf(tmp_path / "none").find() == []
    assert Shelf(tmp_path / "none").newest() is None
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "a\0b"):
        shelf = Shelf(path)
        for action in (shelf.find, shelf.newest, lambda s=shelf: s.claim("r", "d")):
            with pytest.raises(RequestError) as caught:
                action()
            assert caught.value.where == str(path)
            assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(RequestError):
            shelf.begin(4)
        assert len(shelf.retire(1)) == 1
        shelf.discard(4)


def test_what_cannot_be_read_is_not_complete_and_hides_nothing_else(directory, monkeypatch):
    save(directory, 1)
    broken = save(directory, 2)
    real = module.read

    def refuse(folder):
        if folder == broken:
            raise RequestError("x", what="w", found="Permission denied", wanted="m", where="f")
        return real(folder)

    monkeypatch.setattr(module, "read", refuse)
    one, two = Shelf(directory).find()
    assert (one.complete, two.complete) == (True, False)
    assert str(two.faults[0]) == "f: found Permission denied, wanted m"


def test_a_save_is_invisible_until_it_is_committed(directory):
    save(directory, 4)
    shelf = Shelf(directory)
    draft = begin(directory, 8)
    assert draft == shelf.temporary(8) == directory / "step-00000008.tmp"
    assert shelf.newest().step == 4
    assert shelf.commit(8, manifest_of(draft, step=8)) == shelf.folder(8)
    assert shelf.newest().step == 8
    assert not draft.exists()


def test_an_interrupted_save_makes_room_and_a_discarded_one_is_gone(directory, tmp_path):
    shelf = Shelf(directory)
    begin(directory, 4)
    assert list(shelf.begin(4).iterdir()) == []
    shelf.discard(4)
    assert not shelf.temporary(4).exists()
    shelf.discard(4)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    shelf.temporary(4).symlink_to(outside)
    shelf.begin(4)
    assert (outside / "kept").exists()


@pytest.mark.parametrize("make", ["folder", "file", "link", "checkpoint"])
def test_nothing_is_ever_saved_over(directory, make):
    shelf = Shelf(directory)
    draft = begin(directory, 4)
    final = shelf.folder(4)
    {
        "folder": final.mkdir,
        "file": final.touch,
        "link": lambda: final.symlink_to("nowhere"),
        "checkpoint": lambda: save(directory, 5).rename(final),
    }[make]()
    before = content(directory)
    for action in (lambda: shelf.begin(4), lambda: shelf.commit(4, manifest_of(draft, step=4))):
        with pytest.raises(RequestError, match="never saved over") as caught:
            action()
        assert (caught.value.code, caught.value.where) == ("checkpoint.exists", str(final))
    assert content(directory) == before


def test_a_commit_of_files_that_are_not_there_is_refused(directory):
    draft = begin(directory, 4)
    manifest = manifest_of(draft, step=4)
    (draft / ".metadata").write_bytes(b"short")
    with pytest.raises(RunFailedError, match="5 bytes, wanted 40 bytes"):
        Shelf(directory).commit(4, manifest)
    assert complete(directory) == []


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_ends_the_save_with_path_and_cause(directory, monkeypatch, cause):
    save(directory, 4)
    draft = begin(directory, 8)
    manifest = manifest_of(draft, step=8)
    shelf = Shelf(directory)
    path, synced = shelf.temporary(12), draft / "manifest.json"
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, path, cause))
    monkeypatch.setattr(module, "sync", refusing(module.sync, synced, cause))
    for action, where in (
        (lambda: shelf.begin(12), path),
        (lambda: shelf.commit(8, manifest), draft),
    ):
        with pytest.raises(RunFailedError, match=os.strerror(cause)) as caught:
            action()
        assert (caught.value.code, caught.value.where) == ("checkpoint.write_failed", str(where))
    assert complete(directory) == [4]


def test_a_commit_killed_at_any_call_leaves_the_old_or_both(directory):
    save(directory, 4)
    shelf = Shelf(directory)
    seen = set()
    for call in range(1000):
        shelf.discard(8)
        draft = begin(directory, 8)
        status = killed_at(call, lambda d=draft: shelf.commit(8, manifest_of(d, step=8)))
        assert status in (0, KILLED)
        seen.add(tuple(complete(directory)))
        if status == 0:
            break
        if shelf.folder(8).exists():
            shutil.rmtree(shelf.folder(8))
    assert seen == {(4,), (4, 8)}
    assert call > 5


def test_incomplete_later_ones_are_set_aside_and_their_names_free(directory):
    save(directory, 9)
    reasons = leftovers(directory)
    late = sorted(name for name in reasons if step_of(name) not in (None, 11))
    before = content(directory)

    moved = Shelf(directory).set_aside(11)

    assert sorted(old.name for old, _ in moved) == late
    assert all(new.name == f"{old.name}.damaged" for old, new in moved)
    assert sorted(map(str, content(directory).values())) == sorted(map(str, before.values()))
    for name in late:
        save(directory, step_of(name))
        (directory / name / "__0_0.distcp").unlink()
    again = Shelf(directory).set_aside(11)
    assert [new.name for _, new in again] == [f"{name}.damaged-2" for name in late]
    assert complete(directory) == [9]
    assert Shelf(directory).set_aside(-1)[0][0].name == "step-00000011"
    assert Shelf(directory).set_aside(-1) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_oldest_complete_ones_go_and_nothing_else_but_interrupted_saves(directory, keep):
    for step in range(5):
        save(directory, step)
    reasons = leftovers(directory)
    shelf = Shelf(directory)
    assert shelf.retire(0) == []
    assert complete(directory) == [0, 1, 2, 3, 4]

    assert shelf.retire(keep) == []

    assert complete(directory) == [0, 1, 2, 3, 4][-keep:]
    left = {name for name in reasons if not name.endswith(".tmp")}
    kept = {name_of(step) for step in complete(directory)}
    assert {path.name for path in directory.iterdir()} == left | kept | {"owner.json", "notes.txt"}


def test_a_damaged_newest_one_does_not_count_as_kept(directory):
    for step in (1, 2, 3):
        save(directory, step)
    os.truncate(directory / "step-00000003" / "__0_0.distcp", 3)
    assert Shelf(directory).retire(1) == []
    assert complete(directory) == [2]
    assert (directory / "step-00000003").exists()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_retention_killed_at_any_call_keeps_the_newest(directory, keep):
    """R10: whatever is visible is complete, the newest ones are there, the next time mends it."""
    shelf = Shelf(directory)
    for call in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        for step in range(4):
            save(directory, step)
        begin(directory, 9)
        status = killed_at(call, lambda: shelf.retire(keep))
        assert status in (0, KILLED)
        whole = complete(directory)
        assert whole[-keep:] == [0, 1, 2, 3][-keep:]
        assert [f.path.name for f in shelf.find() if not f.complete and f.step is not None] == []
        if status == 0:
            break
        assert shelf.retire(keep) == []
        assert complete(directory) == [0, 1, 2, 3][-keep:]
        assert not list(directory.glob("*.tmp"))
    assert call > 10
    assert whole == [0, 1, 2, 3][-keep:]


@pytest.mark.parametrize("name", ["rename", "rmtree"])
def test_a_failed_delete_is_a_notice_with_path_and_cause(directory, monkeypatch, name):
    for step in (1, 2, 3):
        save(directory, step)
    doomed = directory / "step-00000001"
    place = os if name == "rename" else shutil
    path = doomed if name == "rename" else f"{doomed}.tmp"
    with monkeypatch.context() as patched:
        patched.setattr(place, name, refusing(getattr(place, name), path, errno.EIO))
        (notice,) = Shelf(directory).retire(1)
    assert str(doomed) in notice
    assert os.strerror(errno.EIO) in notice
    assert complete(directory) == ([1, 3] if name == "rename" else [3])
    assert Shelf(directory).retire(1) == []
    assert sorted(os.listdir(directory)) == ["step-00000003"]


def test_what_a_linked_checkpoint_leads_to_is_never_deleted(directory, tmp_path):
    save(directory, 1).rename(tmp_path / "elsewhere")
    (directory / "step-00000001").symlink_to(tmp_path / "elsewhere")
    save(directory, 2)
    assert complete(directory) == [1, 2]
    assert Shelf(directory).retire(1) == []
    assert os.listdir(directory) == ["step-00000002"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 4


def test_a_folder_belongs_to_one_run(directory):
    shelf = Shelf(directory)
    shelf.claim("run-1", "runs/tiny ü")
    save(directory, 4)
    shelf.claim("run-1", "runs/tiny ü")
    shelf.claim("run-1", "runs/moved")
    before = content(directory)
    assert json.loads(before["owner.json"]) == {"run": "run-1", "run_dir": "runs/tiny ü"}
    with pytest.raises(RequestError, match=r"runs/tiny ü.*checkpoint\.directory") as caught:
        shelf.claim("run-2", "runs/other")
    assert (caught.value.code, caught.value.where) == ("checkpoint.owned", str(directory))
    assert content(directory) == before


def test_checkpoints_that_another_run_may_have_saved_are_refused(directory):
    shelf = Shelf(directory)
    save(directory, 4, run="run-2")
    with pytest.raises(RequestError, match=r"step-00000004 and no owner\.json") as caught:
        shelf.claim("run-1", "runs/tiny")
    assert caught.value.code == "checkpoint.owned"
    assert os.listdir(directory) == ["step-00000004"]
    shutil.rmtree(directory)
    shelf.claim("run-1", "runs/tiny")
    save(directory, 8, run="run-2")
    (directory / "step-00000008" / ".metadata").unlink()
    with pytest.raises(RequestError, match="step-00000008, which another run \\(run-2\\)"):
        shelf.claim("run-1", "runs/tiny")


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"run": "run-1"}', b'{"run": 1}', b"\xff"])
def test_a_broken_owner_is_refused_and_told(directory, broken):
    directory.mkdir(parents=True)
    (directory / "owner.json").write_bytes(broken)
    with pytest.raises(RequestError, match=r"broken owner\.json") as caught:
        Shelf(directory).claim("run-1", "runs/tiny")
    assert caught.value.code == "checkpoint.owned"
    assert (directory / "owner.json").read_bytes() == broken


def test_of_two_processes_that_claim_at_once_one_wins(directory):
    directory.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    for attempt in range(20):
        start, (told, tell) = context.Barrier(2), context.Pipe(duplex=False)
        place = directory / str(attempt)
        workers = [
            context.Process(target=_claim, args=(place, run, start, tell)) for run in ("a", "b")
        ]
        for worker in workers:
            worker.start()
        answers = dict(told.recv() for _ in workers)
        for worker in workers:
            worker.join()
        (winner,) = [run for run, refusal in answers.items() if refusal is None]
        (refusal,) = [refusal for refusal in answers.values() if refusal is not None]
        assert f"another run, {winner} in runs/{winner}" in refusal
        assert os.listdir(place) == ["owner.json"]


def _claim(directory, run, start, tell):
    start.wait()
    try:
        Shelf(directory).claim(run, f"runs/{run}")
        tell.send((run, None))
    except RequestError as error:
        tell.send((run, str(error)))


def test_a_claim_killed_at_any_call_can_be_made_again(directory):
    for call in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        if killed_at(call, lambda: Shelf(directory).claim("run-1", "runs/tiny")) == 0:
            break
        assert Shelf(directory).find() == []
        Shelf(directory).claim("run-1", "runs/tiny")
    assert call > 3


def test_a_file_system_without_hard_links_is_claimed_too(directory, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    Shelf(directory).claim("run-1", "runs/tiny")
    Shelf(directory).claim("run-1", "runs/tiny")
    with pytest.raises(RequestError, match="another run"):
        Shelf(directory).claim("run-2", "runs/tiny")


def test_the_newest_is_found_without_reading_all_others(directory, monkeypatch):
    for step in range(6):
        save(directory, step)
    looked = []
    monkeypatch.setattr(module, "look", lambda path: looked.append(path.name) or look(path))
    assert Shelf(directory).newest().step == 5
    assert looked == ["step-00000005"]
