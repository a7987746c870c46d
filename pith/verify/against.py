"""The working tree against a commit: both train the same recipe, as runs that can be compared.

The commit trains without a break. The working tree is killed half way and resumes, so that what it
saves and how it goes on is compared too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pith
from pith.config import Recipe
from pith.config.scaled import shortened
from pith.errors import RequestError, RunFailedError, UnavailableError
from pith.report import Check
from pith.run.environment import code_version
from pith.verify.record import Run, read_run

Say = Callable[[str], None]

LOST = "run.rank-lost"  # the error of a run that a rank was killed of


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout that trains: its label in reports, where it lies, its interpreter, what it holds
    (see `code_version`)."""

    label: str
    root: Path
    python: str
    commit: str | None
    diff_sha256: str | None = None

    @property
    def version(self) -> str:
        """What it holds, for people."""
        changed = " with changes" if self.diff_sha256 else ""
        return f"{(self.commit or 'no commit')[:12]}{changed}"


def working_tree() -> Tree:
    """The checkout that this pith runs from. Raises UnavailableError where it is none."""
    root = Path(pith.__file__).parents[1]
    version = code_version(root)
    if version["commit"] is None:
        raise UnavailableError(
            "validate.checkout",
            what="only a git checkout of pith can be compared with one of its commits",
            found=f"pith in {root}",
            next_step="git clone pith, pip install -e it, and run this there",
        )
    return Tree("working tree", root, sys.executable, version["commit"], version["diff_sha256"])


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what runs in the block as Ctrl-C does: nothing is left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def commit_tree(ref: str, tree: Tree, *, python: str | None, say: Say) -> Iterator[Tree]:
    """`ref` of the repository of `tree`, checked out beside it as long as the block lasts.

    Its interpreter is `python`; without one that of this process, or a new environment where the
    packages that it depends on are others. Raises RequestError for a ref that is none.
    """
    commit = _commit(ref, tree.root)
    with tempfile.TemporaryDirectory(prefix="pith-validate-") as folder:
        root = Path(folder, "tree")
        _git(tree.root, "worktree", "add", "--detach", str(root), commit)
        try:
            own = python or _interpreter(root, tree, folder=Path(folder), say=say)
            yield Tree(ref, root, own, commit)
        finally:
            _git(tree.root, "worktree", "remove", "--force", str(root))


def train(tree: Tree, recipe: Path, options: Sequence[str], *, run_dir: Path) -> Run:
    """The run of the recipe file in `run_dir` that `tree` trains without a break.

    Raises UnavailableError where it does not come to its end: then there is nothing to compare
    with.
    """
    ended = _run(tree, recipe, options, run_dir=run_dir)
    if ended.status:
        raise UnavailableError(
            "validate.baseline",
            what=f"{tree.label} ({tree.version}) does not train this recipe here",
            found=ended.told,
            wanted="exit status 0",
            where=str(ended.log),
            next_step="compare with another commit, or leave out what this one does not know",
        )
    run = read_run(run_dir, label=tree.label)
    if not (check := ran_its_code(tree, run)).ok:
        raise UnavailableError(
            "validate.baseline",
            what=f"what trained was not {tree.label}",
            found=check.found,
            wanted=check.wanted,
            next_step="see that PYTHONPATH and --python bring no other pith",
        )
    return run


def train_with_a_break(
    tree: Tree, recipe: Path, options: Sequence[str], *, run_dir: Path, after: int
) -> tuple[tuple[Check, ...], Run | None]:
    """Let `tree` train the same with rank 0 killed as it begins the step after `after`, then go on.

    The checks of that, and the run where they held. Raises UnavailableError where this machine
    lacks what training needs.
    """
    fault = f"--inject-fault=kill:data:0:{after + 1}"
    killed = _run(tree, recipe, [*options, fault], run_dir=run_dir)
    name = f"{tree.label} trains until it is killed"
    checks = [_check_end(killed, RunFailedError.exit_status, name, LOST)]
    if checks[0].ok:
        ended = _run(tree, recipe, options, run_dir=run_dir)
        checks.append(_check_end(ended, 0, f"{tree.label} goes on after it was killed"))
    if not all(check.ok for check in checks):
        return tuple(checks), None
    run = read_run(run_dir, label=tree.label)
    checks += [ran_its_code(tree, run), _resumed(run, after=after)]
    return tuple(checks), run


def ran_its_code(tree: Tree, run: Run) -> Check:
    """Whether what trained in the run was `tree`, as its environment.json tells."""
    told = run.environment
    found = replace(tree, commit=told.get("commit"), diff_sha256=told.get("diff_sha256"))
    return Check(f"{tree.label} is what ran", found == tree, found.version, tree.version)


def write_recipe(recipe: Recipe, folder: Path, *, steps: int, break_after: int) -> Path:
    """Write what both trees train: `steps` steps, with a checkpoint after `break_after`.

    Warm-up and decay become shorter with the run. It says nothing that is a default: each tree
    takes its own. Gives the file.
    """
    tables = recipe.model_dump()
    if recipe.data.corpus != "embedded":
        tables["data"]["corpus"] = os.path.abspath(recipe.data.corpus)
    tables["training"]["steps"] = steps
    tables["optimizer"] |= shortened(recipe, steps=steps)
    tables["checkpoint"] = {"every": break_after, "keep": 0}
    path = folder / "recipe.toml"
    path.write_text(Recipe.model_validate(tables).to_toml(explicit=True))
    return path


@dataclass(frozen=True, slots=True)
class _Ended:
    """How one command ended: its status, what its report tells of an error, its stderr. `code` is
    that of the error, "" without one."""

    status: int
    code: str
    told: str
    log: Path


def _run(tree: Tree, recipe: Path, options: Sequence[str], *, run_dir: Path) -> _Ended:
    command = [tree.python, "-m", "pith.cli", "train", str(recipe), "--run-dir", str(run_dir)]
    paths = [str(tree.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = run_dir.with_suffix(".log")
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, "--json", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=run_dir.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            report, _ = process.communicate()
        except BaseException:  # it ends its ranks before itself
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    try:
        error = json.loads(report)["error"]
    except (ValueError, KeyError):
        error = None
    told = [f"exit status {process.returncode}"]
    if error is not None:
        told += [error["what"], *(filter(None, [error["found"]]))]
        told += [f"{fault['where']}: found {fault['found']}" for fault in error["faults"][:3]]
    return _Ended(process.returncode, error["code"] if error else "", "; ".join(told), log)


def _check_end(ended: _Ended, status: int, name: str, code: str = "") -> Check:
    """Whether a command ended with this status, and with the error of this code."""
    if ended.status == UnavailableError.exit_status:
        raise UnavailableError("validate.run", what="it cannot train here", found=ended.told)
    ok = ended.status == status and ended.code == code
    wanted = f"exit status {status}" + (f" of {code}" if code else "")
    return Check(name, ok, ended.told, wanted, str(ended.log))


def _resumed(run: Run, *, after: int) -> Check:
    found = ", ".join(f"after step {step}" for step in sorted(run.resumed)) or "not at all"
    return Check(f"{run.label} resumed", run.resumed == {after}, found, f"after step {after}")


def _commit(ref: str, root: Path) -> str:
    found = _git(
        root, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}", check=False
    )
    if found is None:
        raise RequestError(
            "validate.ref",
            what="no such commit",
            found=repr(ref),
            wanted="a branch, tag or commit of this repository",
            where=str(root),
            next_step="git branch --all",
        )
    return found


def _git(root: Path, *words: str, check: bool = True) -> str | None:
    """What git prints; None where it refuses and `check` is off."""
    ended = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    if ended.returncode == 0:
        return ended.stdout.strip()
    if not check:
        return None
    raise UnavailableError(
        "validate.git",
        what="git cannot give the commit to compare with",
        found=(ended.stderr.strip() or "nothing").splitlines()[-1],
        where=str(root),
        next_step=f"git -C {root} worktree prune",
    )


def _interpreter(root: Path, tree: Tree, *, folder: Path, say: Say) -> str:
    """This process's interpreter, or that of a new environment for what `root` depends on."""
    if _dependencies(root) == _dependencies(tree.root):
        return tree.python
    say("its dependencies are others: making an environment for it")
    python = str(folder / "environment" / "bin" / "python")
    commands = (
        [tree.python, "-m", "venv", str(folder / "environment")],
        [python, "-m", "pip", "install", "--quiet", "-e", str(root)],
    )
    for command in commands:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise UnavailableError(
                "validate.environment",
                what="no environment can be made for what the commit depends on",
                found=(ended.stderr.strip() or "nothing").splitlines()[-1],
                next_step="make one by hand and name its interpreter with --python",
            )
    return python


def _dependencies(root: Path) -> object:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
