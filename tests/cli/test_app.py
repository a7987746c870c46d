"""From a command line to an exit status: one line a fault, JSON where asked, no stray traceback."""

import json
import subprocess
import sys

import pytest

import pith
from pith.cli import train
from pith.cli.app import run
from pith.errors import PithError, RunFailedError, UnavailableError
from pith.launch.failures import RankFailedError


def fail_with(monkeypatch, error):
    """Let the train command end in `error` as soon as it reads its recipe."""

    def load(*_):
        raise error

    monkeypatch.setattr(train.Recipe, "load", load)


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["--version"], []])
def test_help_and_version_answer_at_once_without_torch(args):
    code = f"import sys\nfrom pith.cli.app import run\nstatus = run({args})\n"
    code += "assert 'torch' not in sys.modules\nsys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert ("Usage: pith" in done.stdout) != (done.stdout.strip() == pith.__version__)


def test_help_imports_little_and_so_takes_little_of_a_second():
    """Counted, as seconds are the machine's; torch alone imports a thousand more."""
    code = "import sys\nfrom pith.cli.app import run\nrun(['--help'])\n"
    code += "assert len(sys.modules) < 600, len(sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--wings"], "No such option: --wings"),
        (["train", "--nproc", "many"], "--nproc"),
        (["train", "--nproc", "0"], "--nproc"),
        *((["train", "--timeout", bad], "a week") for bad in ("inf", "nan", "1e10", "0", "-1")),
        (["train", "--device", "tpu"], "--device"),
        (["recipe"], "Missing command"),
        (["tokenize"], "Missing"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(capsys, args, words):
    assert run(args) == 2

    stdout, stderr = capsys.readouterr()
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert "--help" in line
    assert stdout == ""


@pytest.mark.parametrize(
    ("args", "verb"),
    [
        (["train", "--wings", "--json"], "train"),
        (["recipe", "show", "nothing", "--json"], "recipe show"),
        (["trian", "--json"], "pith"),
    ],
)
def test_a_failure_is_one_json_report_too_where_json_is_asked_for(capsys, args, verb):
    assert run(args) == 2

    report = json.loads(capsys.readouterr().out)
    assert (report["verb"], report["exit"], report["ok"]) == (verb, 2, False)
    assert report["error"]["what"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFailedError("x", what="no luck", next_step="try again"), 1),
        (UnavailableError("x", what="no luck", next_step="try again"), 3),
    ],
)
def test_an_error_of_pith_is_one_line_and_its_status(monkeypatch, capsys, error, status):
    fail_with(monkeypatch, error)

    assert run(["train"]) == status

    assert capsys.readouterr().err == "error: no luck; next: try again\n"


def test_debug_adds_the_traceback_wherever_it_stands(monkeypatch, capsys):
    fail_with(monkeypatch, RunFailedError("x", what="no luck"))

    for args in (["train", "--debug"], ["--debug", "train"]):
        assert run(args) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_any_other_exception_ends_in_its_traceback_and_exit_4(monkeypatch, capsys):
    fail_with(monkeypatch, ZeroDivisionError("oh"))

    assert run(["train", "--json"]) == 4

    stdout, stderr = capsys.readouterr()
    assert stderr.splitlines()[-1] == "ZeroDivisionError: oh"
    assert "Traceback (most recent call last)" in stderr
    assert json.loads(stdout)["error"]["what"] == "ZeroDivisionError: oh"


def test_of_a_failed_rank_only_its_own_traceback_is_shown(monkeypatch, capsys):
    error = RankFailedError("x", what="rank 1 failed at step 3, slot F0.2")
    error.add_note("Traceback of the rank\nKeyError: 'cause'")
    fail_with(monkeypatch, error)

    assert run(["train"]) == PithError.exit_status

    assert capsys.readouterr().err.splitlines() == [
        "error: rank 1 failed at step 3, slot F0.2",
        "Traceback of the rank",
        "KeyError: 'cause'",
    ]


def test_an_interrupt_is_exit_130(monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())

    assert run(["train"]) == 130


@pytest.mark.parametrize(
    ("words", "stdout", "cause"),
    [
        ("recipe schema --json", "/dev/full", "No space left"),
        ("recipe schema --json", "&-", "closed"),
        ("--help", "/dev/full", "No space left"),
        ("--version", "/dev/full", "No space left"),
    ],
)
def test_a_stdout_that_takes_no_answer_is_one_line_and_exit_2(words, stdout, cause):
    command = f"{sys.executable} -m pith.cli {words} >{stdout}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    error = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert (done.returncode, len(error)) == (2, 1), done.stderr
    assert cause in error[0]
    assert "Traceback" not in done.stderr


def test_a_closed_stderr_does_not_keep_the_report_back():
    command = f"{sys.executable} -m pith.cli recipe list --json 2>&-"
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"]


def test_nonsense_of_a_launcher_leaves_other_errors_as_they_are():
    command = f"SLURM_PROCID=0 SLURM_NTASKS=x {sys.executable} -m pith.cli recipe show nope"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
