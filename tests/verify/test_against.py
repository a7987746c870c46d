"""`pith validate --against`: a small copy of the checkout against its own commit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import pith
from pith.cli.app import run
from pith.config import Recipe
from pith.errors import RequestError, UnavailableError
from pith.verify import against
from pith.verify.compare import compare
from pith.verify.record import read_run

ROOT = Path(__file__).parents[2]
CORPUS = Path("tests", "broken", "mutations")
RECIPE = CORPUS / "sensitive.toml"
OPTIONS = ("--device=cpu", "--timeout=60")
STEPS = 4


@dataclass(frozen=True)
class Copy:
    """A checkout of its own, and what validate found in it as it is committed."""

    root: Path
    status: int
    report: dict[str, Any]

    @property
    def runs(self) -> Path:
        return Path(self.report["data"]["folder"])


def git(root: Path, *words: str) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(root), *author, *words], check=True, capture_output=True)


def edit(path: Path, found: str, replaced: str) -> None:
    text = path.read_text()
    assert text.count(found) == 1
    path.write_text(text.replace(found, replaced))


@pytest.fixture
def inside(copy: Copy) -> Iterator[pytest.MonkeyPatch]:
    """Within the copy, as if its pith ran here; what a test changes there is put back."""
    with pytest.MonkeyPatch.context() as patch:
        _enter(copy.root, patch)
        yield patch
    git(copy.root, "checkout", "--quiet", "main", ".")
    git(copy.root, "worktree", "prune")
    git(copy.root, "checkout", "--quiet", "main")


def _enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pith, "__file__", str(root / "pith" / "__init__.py"))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.chdir(root)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The whole command, once, on a copy without a change."""
    root = tmp_path_factory.mktemp("copy") / "pith-copy"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pith", root / "pith", ignore=without)
    shutil.copytree(ROOT / CORPUS, root / CORPUS)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=first")
    with pytest.MonkeyPatch.context() as patch:
        _enter(root, patch)
        status = validate("HEAD", out := root.parent / "report.json")
    return Copy(root, status, json.loads(out.read_text()))


def validate(ref: str, out: Path, *options: str) -> int:
    words = ("validate", str(RECIPE), f"--against={ref}", f"--steps={STEPS}", f"--out={out}")
    return run([*words, *OPTIONS, *options])


def test_a_tree_without_a_change_passes_and_is_what_ran(copy: Copy) -> None:
    failed = [check for check in copy.report["checks"] if not check["ok"]]
    assert (copy.status, failed) == (0, [])
    data = copy.report["data"]
    assert data["first_unequal"] is None
    assert data["steps_compared"] == STEPS
    assert data["tolerance"] == "same order on a CPU: equal bits"
    assert data["weights"]["max_relative"] == 0
    held = {check["name"]: check["found"] for check in copy.report["checks"]}
    commit = read_run(copy.runs / "after", label="").environment["commit"]
    assert held["working tree is what ran"] == commit[:12]
    assert held["working tree resumed"] == f"after step {STEPS // 2}"
    assert "killed by SIGKILL" in held["working tree trains until it is killed"]


def test_both_trees_train_one_recipe_and_neither_is_left_behind(copy: Copy) -> None:
    before, after = (read_run(copy.runs / name, label=name) for name in ("before", "after"))
    assert before.recipe == after.recipe
    assert before.recipe.training.steps == STEPS
    assert os.path.isabs(before.recipe.data.corpus)
    listed = subprocess.check_output(["git", "-C", copy.root, "worktree", "list"], text=True)
    assert len(listed.splitlines()) == 1


def test_a_recipe_is_handed_over_without_its_defaults_and_in_proportion(tmp_path: Path) -> None:
    recipe = Recipe.load(str(ROOT / RECIPE))
    path = against.write_recipe(recipe, tmp_path, steps=6, break_after=3)
    told = tomllib.loads(path.read_text())
    assert told["checkpoint"] == {"every": 3, "keep": 0}
    assert "betas" not in told["optimizer"]
    assert told["training"]["clip"] == 0.5
    again = Recipe.load(str(path))
    assert again.training == recipe.training.model_copy(update={"steps": 6})
    assert again.balance == recipe.balance
    rates = []
    for steps in (4, 8, 20):
        path = against.write_recipe(recipe, tmp_path, steps=steps, break_after=2)
        optimizer = Recipe.load(str(path)).optimizer
        rates.append((optimizer.warmup_steps, optimizer.decay_steps))
    assert rates == [(1, 2), (2, 4), (2, 4)]


@pytest.mark.usefixtures("inside")
def test_a_change_of_what_is_learnt_is_told_from_its_first_step_on(copy: Copy) -> None:
    edit(copy.root / "pith/train/state.py", "manifest.position.updates)", "1)")
    tree = against.working_tree()
    assert tree.version.endswith(" with changes")
    recipe, run_dir = copy.runs / "recipe.toml", copy.runs / "changed"
    checks, changed = against.train_with_a_break(
        tree, recipe, OPTIONS, run_dir=run_dir, after=STEPS // 2
    )
    assert all(check.ok for check in checks), checks
    assert changed is not None
    found = compare(read_run(copy.runs / "before", label="HEAD"), changed)
    assert found.first_difference is not None
    # The optimizer goes on with another bias correction, which moves the weights of step 3.
    assert (found.first_difference.step, found.first_difference.quantity) == (4, "loss")


@pytest.mark.usefixtures("inside")
def test_a_tree_that_changed_while_it_trained_is_not_what_ran(copy: Copy) -> None:
    tree, trained = against.working_tree(), read_run(copy.runs / "after", label="after")
    assert against.ran_its_code(tree, trained).ok
    edit(copy.root / "pith/train/state.py", "import math\n", "import math  # changed\n")
    assert not against.ran_its_code(against.working_tree(), trained).ok
    untold = replace(trained, environment={})
    assert not against.ran_its_code(tree, untold).ok


@pytest.mark.parametrize("ref", ["no-such-branch", "HEAD~7", "--force", ""])
@pytest.mark.usefixtures("inside")
def test_a_ref_that_is_none_is_refused_before_anything_trains(ref: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert validate(ref, out) == 2
    error = json.loads(out.read_text())["error"]
    assert error["code"] == "validate.ref"
    assert error["found"] == repr(ref)


def test_outside_of_a_checkout_nothing_is_compared(
    copy: Copy, inside: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "pith"
    installed.mkdir(parents=True)
    inside.setattr(pith, "__file__", str(installed / "__init__.py"))
    assert validate("HEAD", tmp_path / "report.json") == 3
    inside.setattr(pith, "__file__", str(copy.root / "pith" / "__init__.py"))
    inside.setenv("PATH", str(tmp_path))  # no git there
    assert validate("HEAD", tmp_path / "report.json") == 3


@pytest.mark.usefixtures("inside")
def test_a_commit_that_does_not_train_gives_nothing_to_compare_with(
    copy: Copy, tmp_path: Path
) -> None:
    git(copy.root, "checkout", "--quiet", "-b", "broken")
    (copy.root / "pith/cli/__main__.py").write_text("raise SystemExit(1)\n")
    git(copy.root, "commit", "--quiet", "--all", "--message=does not train")
    git(copy.root, "checkout", "--quiet", "main")
    out = tmp_path / "report.json"
    assert validate("broken", out) == 3
    error = json.loads(out.read_text())["error"]
    assert error["code"] == "validate.baseline"
    assert "exit status 1" in error["found"]


@pytest.mark.usefixtures("inside")
def test_a_run_that_hangs_is_ended_by_the_timeout_and_is_no_killed_one(copy: Copy) -> None:
    edit(
        copy.root / "pith/train/step.py",
        "        clock.zero()\n",
        "        clock.zero()\n        import time; time.sleep(self.world.rank * 600)\n",
    )
    options = ("--device=cpu", "--nproc=2", "--timeout=4")
    recipe, run_dir = copy.runs / "two.toml", copy.runs / "hanging"
    two = Recipe.load(str(ROOT / RECIPE)).model_dump()
    two["training"]["global_batch_size"] = 4
    recipe.write_text(Recipe.model_validate(two, context={"world_size": 2}).to_toml())
    checks, hanging = against.train_with_a_break(
        against.working_tree(), recipe, options, run_dir=run_dir, after=1
    )
    assert hanging is None
    assert [check.ok for check in checks] == [False]
    assert checks[0].wanted == "exit status 1 of run.rank-lost"


@pytest.fixture
def commands(inside: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that would make an environment; none of them runs."""
    given: list[Sequence[str]] = []
    whole = subprocess.run

    def pretend(command: Sequence[str], **options: Any) -> Any:
        if command[0] == "git":
            return whole(command, **options)
        given.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    inside.setattr(against.subprocess, "run", pretend)
    return given


def test_other_dependencies_get_an_environment_unless_an_interpreter_is_named(
    copy: Copy, commands: list[Sequence[str]]
) -> None:
    said: list[str] = []
    edit(copy.root / "pyproject.toml", '"typer>=0.20"', '"typer>=0.21"')
    tree = against.working_tree()
    with against.commit_tree("HEAD", tree, python="/opt/python", say=said.append) as baseline:
        assert (baseline.python, commands, said) == ("/opt/python", [], [])
    with against.commit_tree("HEAD", tree, python=None, say=said.append) as baseline:
        made, installed = commands
        assert made[:3] == [sys.executable, "-m", "venv"]
        assert baseline.python.startswith(str(made[3]))
        assert installed[:3] == [baseline.python, "-m", "pip"]
        assert installed[-2:] == ["-e", str(baseline.root)]
        assert (baseline.root / "pyproject.toml").read_text() != (
            copy.root / "pyproject.toml"
        ).read_text()
    assert len(said) == 1
    assert not baseline.root.exists()


def test_an_environment_that_cannot_be_made_says_so(
    copy: Copy, commands: list[Sequence[str]], inside: pytest.MonkeyPatch
) -> None:
    edit(copy.root / "pyproject.toml", '"typer>=0.20"', '"typer>=0.21"')
    pretend = against.subprocess.run

    def refuse(command: Sequence[str], **options: Any) -> Any:
        done = pretend(command, **options)
        if command[0] == "git":
            return done
        return subprocess.CompletedProcess(command, 1, "", "no network\n")

    inside.setattr(against.subprocess, "run", refuse)
    tree = against.working_tree()
    with (
        pytest.raises(UnavailableError, match="no network"),
        against.commit_tree("HEAD", tree, python=None, say=lambda text: None),
    ):
        pass
    assert commands


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--layouts", "pp=2", "--html", "page.html"],
        ["--layouts", "pp=2", "--min-speed", "0.9"],
        ["--layouts", "pp=2", "--reordered"],
        ["tiny-moe", "qwen3-0.6b", "--against", "HEAD"],
        ["qwen3-30b-a3b", "--layouts", "pp=2"],
    ],
)
def test_what_would_not_be_looked_at_is_refused(words: list[str]) -> None:
    assert run(["validate", *words]) == RequestError.exit_status


def test_sigterm_interrupts_as_ctrl_c_does_and_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), against.interrupted_by_sigterm():
        signal.raise_signal(signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) == before
