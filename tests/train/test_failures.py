"""Runs that cannot end well end soon, say why in a line or a traceback, and leave no process."""

import json
import math
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pith.checkpoint.store import read_whole
from pith.config import Recipe

SITES = ("data", "forward", "backward", "optimizer")
PLACES = [*((site, 1) for site in SITES), ("backward", 0)]
BROKEN_RECIPES = sorted((Path(__file__).parents[1] / "broken" / "recipes").glob("*.toml"))


def assert_ended(run: Any, *, status: int) -> None:
    """Ended as it should, with nothing that runs on or that could be taken for a finished run."""
    assert run.status == status, run.stderr
    assert run.survivors == []
    assert not list(run.cwd.rglob("step-*"))
    assert not list(run.cwd.rglob("runs/*/report.json"))


def metrics_of(run: Any) -> list[dict[str, Any]]:
    return list(map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines()))


def errors_of(run: Any) -> list[str]:
    """What a run said after its lines about steps."""
    return [line for line in run.stderr.splitlines() if not re.match(r"step |run folder ", line)]


@pytest.mark.parametrize(("site", "rank"), PLACES)
def test_a_rank_that_raises_ends_the_run_with_its_own_traceback_last(
    command: Any, site: str, rank: int
) -> None:
    run = command.train("--inject-fault", f"raise:{site}:{rank}:2")

    assert_ended(run, status=4)
    assert run.seconds_after_last_step < 15
    error, title, *trace = errors_of(run)
    assert error.startswith(f"error: rank {rank} failed at step 2, slot ")
    assert title == "Traceback (most recent call last):"
    assert trace[-1] == f"pith.train.fault.InjectedError: ordered at {site} of step 2"
    assert not [line for line in trace if line.startswith("Traceback")]


@pytest.mark.parametrize(("site", "rank"), PLACES)
def test_a_killed_rank_ends_the_run_in_one_line(command: Any, site: str, rank: int) -> None:
    run = command.train("--inject-fault", f"kill:{site}:{rank}:2", "--json")

    assert_ended(run, status=1)
    assert run.seconds_after_last_step < 15
    (line,) = errors_of(run)
    assert f"rank {rank} was killed by SIGKILL at step 2, slot " in line
    slot = line.partition("slot ")[2].partition(";")[0]
    assert re.fullmatch({"forward": r"F.*", "backward": r"[BIW].*"}.get(site, site), slot)
    report = json.loads(run.stdout)
    assert (report["ok"], report["exit"], report["error"]["code"]) == (False, 1, "run.rank-lost")


# Four processes, pp 2 x ep 2. The pairs of 1f1b-pair hold the first backward of each row.
SPLITS = {"parallel.exchange": "splits", "parallel.schedule": "1f1b-pair"}
STRIKES = [
    ("gather", 3, {}),
    ("dispatch", 0, {}),
    ("combine", 3, {}),
    ("combine-backward", 1, {}),
    ("dispatch-backward", 2, {}),
    ("dispatch", 2, SPLITS),
    ("combine", 1, SPLITS),
    ("combine-backward", 3, SPLITS),
    ("dispatch-backward", 0, SPLITS),
    ("route", 2, SPLITS),
    ("reduce", 1, SPLITS),
]


def phase_slots(recipe: Recipe, rank: int) -> dict[str, str]:
    """The slot of its row in which `rank` of four first comes to each phase of the exchange."""
    row = recipe.table(4).row_texts()[recipe.mesh(4).coordinates(rank).pp].split()
    stages = "".join(str(stage) for stage, layers in enumerate(recipe.pipeline().split) if layers)
    forward, backward = (
        next(slot for slot in row if re.search(rf"[{kinds}][{stages}]\.", slot))
        for kinds in ("F", "BI")
    )
    ways_back = ("combine-backward", "dispatch-backward")
    return {
        "route": forward,
        "dispatch": forward,
        "combine": forward,
        **dict.fromkeys(ways_back, backward),
    }


@pytest.mark.parametrize(("site", "rank", "settings"), STRIKES)
def test_a_rank_killed_while_ranks_exchange_tokens_or_weights_ends_the_run_in_one_line(
    command: Any, site: str, rank: int, settings: dict[str, object]
) -> None:
    settings = {"parallel.ep": 2, **settings}
    phases = phase_slots(command.recipe(settings), rank)

    run = command.train("--json", f"--inject-fault=kill:{site}:{rank}:2", settings=settings)

    assert_ended(run, status=1)
    assert run.seconds_after_last_step < 15
    assert [line["step"] for line in metrics_of(run)] == [1], "the fault should strike in step 2"
    (line,) = errors_of(run)
    where = f"at step 2, slot {phases.get(site, site)};"
    assert line.startswith(f"error: rank {rank} was killed by SIGKILL {where}")
    assert json.loads(run.stdout)["error"]["code"] == "run.rank-lost"


def test_a_rank_killed_in_validation_is_said_to_be_there(command: Any) -> None:
    run = command.train("--inject-fault=kill:validation:1:2", settings={"validation.every": 2})

    assert_ended(run, status=1)
    (line,) = errors_of(run)
    assert line.startswith("error: rank 1 was killed by SIGKILL at step 2, slot validation;")


def test_exchanges_are_struck_in_pairs_too(command: Any) -> None:
    recipe = command.recipe({"parallel.ep": 2, **SPLITS})
    assert all("|B" in phase_slots(recipe, rank)["combine-backward"] for rank in range(4))


def test_a_rank_that_hangs_is_named_once_the_others_have_waited_long_enough(command: Any) -> None:
    run = command.train("--inject-fault", "hang:forward:1:2", "--timeout", "5")

    assert_ended(run, status=1)
    assert 5 <= run.seconds_after_last_step < 5 + 15
    error = errors_of(run)[0]
    assert error.startswith("error: a rank stopped answering: rank 1 at step 2, slot F")


def test_a_step_that_is_not_finite_stops_the_run_and_saves_nothing(command: Any) -> None:
    run = command.train("--json", settings={"optimizer.lr": 1e38})

    assert_ended(run, status=1)
    (line,) = (line for line in errors_of(run) if line.startswith("error"))
    assert line.startswith("error: step 2: loss nan is not finite on rank 0")
    assert json.loads(run.stdout)["error"]["code"] == "run.non-finite"
    *_, last, event = metrics_of(run)
    assert (last["step"], last["loss"]) == (2, None)
    assert (event["event"], event["step"]) == ("non_finite", 2)
    assert 0 in event["ranks"]


def test_the_skip_policy_passes_over_such_steps_up_to_its_limit(command: Any) -> None:
    skip = {"training.non_finite": "skip", "training.max_skips": 2, "training.steps": 6}
    run = command.train(settings={"optimizer.lr": 1e38, **skip})

    assert_ended(run, status=1)
    assert "step 4: " in errors_of(run)[-1]
    assert "3 such steps in a row" in errors_of(run)[-1]
    lines = metrics_of(run)
    assert [line["step"] for line in lines if "event" not in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line.get("event") == "non_finite"] == [2, 3, 4]


def test_a_last_update_that_ruins_the_model_is_no_finished_run(command: Any) -> None:
    run = command.train(settings={"optimizer.lr": 1e38, "training.steps": 1})

    assert_ended(run, status=1)
    assert "values that are not finite are not saved; nothing was committed" in errors_of(run)[-1]


def test_a_model_of_finite_weights_whose_validation_is_not_is_no_finished_run(
    command: Any,
) -> None:
    settings = {"optimizer.lr": 1e18, "training.steps": 1}
    run = command.train(settings=settings)
    again = command.train(settings=settings, cwd=run.cwd)

    for ended in (run, again):
        assert ended.status == 1, ended.stderr
        assert ended.survivors == []
        assert not ended.run_dir.joinpath("report.json").exists()
        assert "error: the validation loss is nan" in errors_of(ended)[-1]
    saved = read_whole(run.run_dir / "checkpoints" / "step-00000001")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_a_folder_that_holds_checkpoints_of_another_run_is_refused_at_the_start(
    command: Any,
) -> None:
    short = {"checkpoint.directory": "kept", "training.steps": 1}
    first = command.train(settings=short)
    assert first.status == 0, first.stderr
    before = contents(first.cwd / "kept" / "step-00000001")
    run = command.train("--run-dir=other", settings=short, cwd=first.cwd)

    assert run.status == 2, run.stderr
    assert run.survivors == []
    (line,) = errors_of(run)
    assert line.startswith(f"error: {first.cwd}/kept: ")
    assert "the checkpoints of another run, " in line
    assert f" in {first.run_dir}; wanted a folder of its own for each run" in line
    assert not (first.cwd / "other").exists()
    assert contents(first.cwd / "kept" / "step-00000001") == before


def poke(path: Path, position: int, value: int) -> None:
    """Overwrite one token."""
    tokens = np.memmap(path, dtype="<u2", mode="r+")
    assert tokens[position] != value
    tokens[position] = value
    tokens.flush()


def cut(path: Path, num_bytes: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - num_bytes])


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a token cut off": ("tokens-00000.bin", lambda path: cut(path, 2), "wrong size"),
    "half a token": ("tokens-00000.bin", lambda path: cut(path, 1), "wrong size"),
    "an empty shard": ("tokens-00000.bin", lambda path: path.write_bytes(b""), "is empty"),
    "a missing shard": ("tokens-00000.bin", Path.unlink, "is missing"),
    "an unknown id": ("tokens-00000.bin", lambda path: poke(path, 7, 60000), "token 7 is outside"),
    "another id": ("tokens-00000.bin", lambda path: poke(path, 7, 1), "not what was written"),
    "cut offsets": ("offsets.bin", lambda path: cut(path, 8), "wrong size"),
    "a cut manifest": ("manifest.json", lambda path: cut(path, 40), "manifest is damaged"),
    "no manifest": ("manifest.json", Path.unlink, "manifest is missing"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_refused(run: Any, *words: str) -> None:
    """Refused in one line with all of `words`."""
    assert_ended(run, status=2)
    (line,) = errors_of(run)
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_corpus_is_refused_by_file_and_left_as_it_is(
    command: Any, tmp_path: Path, damage: str
) -> None:
    name, spoil, words = DAMAGE[damage]
    corpus = tmp_path / "tokens"
    shutil.copytree(command.corpus, corpus)
    spoil(corpus / name)
    before = contents(corpus)

    run = command.train(settings={"data.corpus": corpus})

    assert_refused(run, str(corpus / name), words)
    assert contents(corpus) == before


def test_a_corpus_with_ids_that_the_model_lacks_is_refused(command: Any) -> None:
    run = command.train(settings={"model.fields.vocab_size": 200})
    assert_refused(run, "found 257 ids", "at most 200", "manifest.json")


@pytest.mark.parametrize(("num_characters", "found"), [(7 * 32 + 1, 7), (30, 0)])
def test_a_corpus_smaller_than_one_batch_is_refused_with_both_numbers(
    command: Any, tmp_path: Path, num_characters: int, found: int
) -> None:
    text = tmp_path / "small.txt"
    text.write_text("x" * num_characters)

    run = command.train(settings={"data.corpus": text, "data.validation": 0})

    assert_refused(run, f"found {found} training sequences", "at least 8", "one global batch")
    assert text.read_text() == "x" * num_characters


def test_one_batch_is_enough_unless_the_epochs_are_limited(command: Any, tmp_path: Path) -> None:
    text = tmp_path / "one-batch.txt"
    text.write_text("x" * (8 * 32 + 1))
    settings = {"data.corpus": text, "data.validation": 0, "training.steps": 2}

    run = command.train("--json", settings=settings)
    assert run.status == 0, run.stderr
    assert math.isfinite(run.data["last_loss"])
    assert run.data["validation_loss"] is None

    run = command.train(settings={**settings, "data.epochs": 1})
    assert_refused(run, "does not last for 2 steps", "found 8 sequences in 1 epoch", "wanted 16")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", "no document"),
        ("blank.jsonl", '{"text": " "}\n', "no document"),
        ("cut.jsonl", '{"text": "The quick brown fox', "cut.jsonl:1"),
        ("book.pdf", "%PDF", ".jsonl.zst"),
        ("absent.txt", None, "no such"),
    ],
)
def test_a_text_that_gives_no_tokens_is_refused(
    command: Any, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    text = tmp_path / name
    if content is not None:
        text.write_text(content)

    run = command.train(settings={"data.corpus": text})

    assert_refused(run, name, words)
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else [name])


def cpu_seconds_of_children() -> float:
    """What ended children have computed: other work on the machine does not lengthen it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("path", BROKEN_RECIPES, ids=lambda path: path.stem)
def test_an_impossible_recipe_is_refused_whole_before_anything_starts(
    command: Any, path: Path
) -> None:
    named = path.read_text().splitlines()[0].removeprefix("# faults: ").split(", ")

    words = ["train", str(path), "--json"]
    before = cpu_seconds_of_children()
    run = command.start(words, prefix=("-X", "importtime", "-m", "pith.cli")).finish()

    assert run.status == 2, run.stderr
    assert cpu_seconds_of_children() - before < 5
    assert run.survivors == []
    assert list(run.cwd.iterdir()) == []
    faults = json.loads(run.stdout)["error"]["faults"]
    assert sorted(fault["where"] for fault in faults) == sorted(named)
    imports, said = [], []
    for line in run.stderr.splitlines():
        (imports if line.startswith("import time:") else said).append(line)
    assert imports
    assert not [line for line in imports if line.split()[-1] == "torch"], "torch is a start already"
    assert len(said) == 1 + len(faults)
    assert all(f"  {fault['where']}: found " in run.stderr for fault in faults)
