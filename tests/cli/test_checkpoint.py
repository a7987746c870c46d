"""`pith checkpoint`: what is there, whether it is whole, what it says; exit statuses."""

import json
import os
import subprocess
import sys

import pytest

from pith.checkpoint.manifest import MANIFEST, read
from pith.cli.app import run
from tests.checkpoint.by_hand import TENSORS, begin, leftovers, save


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs of üs" / "tiny"
    save(folder / "checkpoints", 4, loss=3.25)
    save(folder / "checkpoints", 8)
    return folder


@pytest.fixture
def ask(capsys):
    """Run `pith checkpoint ...`: exit status, the JSON report, and the words."""

    def asked(*words):
        status = run(["checkpoint", *map(str, words), "--json"])
        stdout, stderr = capsys.readouterr()
        report = json.loads(stdout)
        assert (report["exit"], report["ok"]) == (status, status == 0)
        return status, report, stderr

    return asked


def test_list_tells_the_complete_ones_and_the_leftovers_with_reasons(run_dir, ask):
    directory = run_dir / "checkpoints"
    reasons = leftovers(directory)
    status, report, text = ask("list", run_dir)
    assert (status, report["verb"]) == (0, "checkpoint list")
    assert report["data"]["newest"] == str(directory / "step-00000008")
    entries = {os.path.basename(entry["path"]): entry for entry in report["data"]["checkpoints"]}
    assert set(entries) == {"step-00000004", "step-00000008", *reasons}
    first = entries["step-00000004"]
    assert first["bytes"] == sum(p.stat().st_size for p in (directory / "step-00000004").iterdir())
    assert first["complete"] is True
    assert (first["step"], first["last_loss"], first["faults"]) == (4, 3.25, [])
    assert first["layout"] == {"pp": 2, "dp": 1, "cp": 1, "ep": 2}
    lines = dict(zip(entries, text.splitlines(), strict=True))
    for name, reason in reasons.items():
        assert entries[name]["complete"] is False
        assert reason in "; ".join(entries[name]["faults"])
        assert reason in lines[name]
        assert "not complete" in lines[name]
    assert "notes.txt" not in text
    assert report["next"] == [f"pith checkpoint verify '{directory / 'step-00000008'}'"]


def test_list_takes_a_run_a_folder_or_one_checkpoint_by_any_path(run_dir, ask, monkeypatch):
    directory = run_dir / "checkpoints"
    for path in (run_dir, directory):
        status, report, _ = ask("list", path)
        assert (status, len(report["data"]["checkpoints"])) == (0, 2)
    (run_dir / "latest").symlink_to(directory / "step-00000004")
    monkeypatch.chdir(directory / "step-00000004")
    for path in (directory / "step-00000004", run_dir / "latest", "."):
        status, report, _ = ask("list", path)
        assert (status, [c["step"] for c in report["data"]["checkpoints"]]) == (0, [4])


def test_list_of_nothing_complete_is_exit_1(tmp_path, ask):
    assert ask("list", tmp_path)[:2][0] == 1
    begin(tmp_path, 4)
    status, report, text = ask("list", tmp_path)
    assert (status, report["data"]["newest"]) == (1, None)
    assert "interrupted save" in text


@pytest.mark.parametrize("verb", ["list", "verify", "inspect"])
def test_a_path_that_leads_nowhere_is_exit_2_and_one_line(verb, tmp_path, ask):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "step-00000004", tmp_path / "file"):
        status, report, text = ask(verb, path)
        assert (status, len(text.splitlines())) == (2, 1), path
        assert report["error"]["where"] == str(path)


def test_verify_holds_for_what_is_as_written(run_dir, ask, tmp_path):
    out = tmp_path / "report.json"
    status, report, text = ask("verify", run_dir, "--out", out)
    assert status == 0
    assert [(c["name"], c["ok"]) for c in report["checks"]] == [
        ("step-00000004", True), ("step-00000008", True),
    ]  # fmt: skip
    assert text.count("held") == 2
    assert report["next"] == [f"pith checkpoint list '{run_dir}'"]
    assert json.loads(out.read_text()) == report
    begin(run_dir / "checkpoints", 12)
    assert ask("verify", run_dir)[0] == 0, "an interrupted save is no checkpoint"


def test_verify_names_every_fault_with_found_and_wanted(run_dir, ask):
    folder = run_dir / "checkpoints" / "step-00000004"
    flipped = bytearray((folder / "__0_0.distcp").read_bytes())
    flipped[33] ^= 4
    (folder / "__0_0.distcp").write_bytes(flipped)
    (folder / "__1_0.distcp").unlink()
    os.truncate(folder / ".metadata", 7)
    (folder / "extra").touch()
    for path in (run_dir, folder):
        status, report, text = ask("verify", path)
        assert status == 1
        damaged = report["data"]["checkpoints"][0]
        assert [(f["where"], f["found"][:9], f["wanted"][:9]) for f in damaged["faults"]] == [
            (str(folder / ".metadata"), "7 bytes", "40 bytes"),
            (str(folder / "__1_0.distcp"), "no such f", "122 bytes"),
            (str(folder / "__0_0.distcp"), "sha256 " + damaged["faults"][2]["found"][7:9], "sha256 "
             + read(folder).files[1].sha256[:2]),
            (str(folder / "extra"), "a file th", "none"),
        ]  # fmt: skip
        for fault in damaged["faults"]:
            assert f"{fault['where']}: found {fault['found']}, wanted {fault['wanted']}" in text
        assert [c["ok"] for c in report["checks"]] == [False, True][: len(report["checks"])]


@pytest.mark.parametrize("break_it", ["manifest flipped", "manifest gone", "empty", "renamed"])
def test_verify_finds_a_checkpoint_that_does_not_say_what_it_is(run_dir, ask, break_it):
    folder = run_dir / "checkpoints" / "step-00000008"
    match break_it:
        case "manifest flipped":
            content = (folder / MANIFEST).read_bytes()
            (folder / MANIFEST).write_bytes(content.replace(b'"step": 8', b'"step": 9'))
        case "manifest gone":
            (folder / MANIFEST).unlink()
        case "empty":
            folder.rename(run_dir / "elsewhere")
            folder.mkdir()
        case "renamed":
            folder.rename(folder.with_name("step-00000009"))
    status, report, _ = ask("verify", run_dir)
    assert status == 1
    assert [check["ok"] for check in report["checks"]] == [True, False]
    assert report["checks"][1]["found"]


@pytest.mark.parametrize("make", ["nothing", "leftover", "another name"])
def test_verify_without_a_checkpoint_is_exit_2(tmp_path, ask, make):
    path = tmp_path
    if make == "leftover":
        begin(tmp_path, 4)
    if make == "another name":
        path = save(tmp_path, 4).rename(tmp_path / "best")
    status, report, _ = ask("verify", path)
    assert (status, report["error"]["code"]) == (2, "checkpoint.none")


def test_inspect_says_all_that_the_manifest_says(run_dir, ask):
    folder = run_dir / "checkpoints" / "step-00000008"
    for path in (run_dir, run_dir / "checkpoints", folder):
        status, report, text = ask("inspect", path)
        data = report["data"]
        assert (status, data["path"], data["complete"]) == (0, str(folder), True)
        assert {k: v for k, v in data.items() if k not in ("path", "complete", "kinds")} == (
            read(folder).model_dump(mode="json")
        )
        assert data["kinds"] == {
            "model": {"tensors": 2, "elements": 36, "bytes": 136},
            "optimizer.exp_avg": {"tensors": 1, "elements": 32, "bytes": 128},
            "optimizer.exp_avg_sq": {"tensors": 1, "elements": 32, "bytes": 128},
        }
        words = ["step 8: 64 samples", "5.5000", "2.5000", "recipe tiny", "pp 2 dp 1 cp 1 ep 2"]
        assert [word for word in (*words, "torch 2.13", "4 tensors") if word not in text] == []
        assert "model.embed" not in text


def test_inspect_lists_tensors_where_asked(run_dir, ask):
    _, report, text = ask("inspect", run_dir, "--tensors")
    lines = [line.split(maxsplit=2) for line in text.splitlines()[-len(TENSORS) :]]
    assert lines == [[n, t.dtype, str(list(t.shape))] for n, t in sorted(TENSORS.items())]
    assert report["data"]["tensors"]["model.norm"] == {"shape": [4], "dtype": "bfloat16"}


def test_inspect_of_a_damaged_one_shows_it_and_is_exit_1(run_dir, ask):
    folder = run_dir / "checkpoints" / "step-00000008"
    (folder / ".metadata").unlink()
    status, report, text = ask("inspect", folder)
    assert (status, report["data"]["complete"]) == (1, False)
    assert "NOT COMPLETE" in text
    assert str(folder / ".metadata") in text
    status, report, _ = ask("inspect", run_dir)
    assert (status, report["data"]["position"]["step"]) == (0, 4), "the newest complete one"
    (folder / MANIFEST).write_text("{}")
    assert ask("inspect", folder)[0] == 2


def test_no_command_imports_torch(run_dir):
    for verb in ("list", "verify", "inspect"):
        code = f"import sys\nfrom pith.cli.app import run\nstatus = run(['checkpoint', {verb!r}, "
        code += f"{str(run_dir)!r}])\nassert 'torch' not in sys.modules\nsys.exit(status)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
