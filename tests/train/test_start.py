"""Where a run starts: found and checked in one process, before a rank is."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pith.checkpoint.manifest import read
from pith.data.tokenize import tokenize
from pith.errors import PithError
from pith.train.start import Resume, Start, begun
from tests.train.conftest import DOCUMENT

SAVED = {"checkpoint.every": 2, "checkpoint.keep": 0}  # of 4 steps: step-00000002, step-00000004
NAMES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json")
OLD, NEW = "step-00000002", "step-00000004"


@pytest.fixture(scope="module")
def trained(command: Any) -> Path:
    """The folder of a run that has taken its 4 steps; nobody changes it."""
    run = command.train(settings=SAVED)
    assert run.status == 0, run.stderr
    folder = run.run_dir
    assert sorted(path.name for path in (folder / "checkpoints" / NEW).iterdir()) == [*NAMES]
    return Path(folder)


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, elsewhere: it goes on from there."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def broken_off(place: Path) -> Path:
    """The same as if it had been killed after its last save."""
    (place / "report.json").unlink()
    return place


@pytest.fixture
def begin(command: Any) -> Callable[..., Start]:
    """Begin the run in a folder, with settings on top of those that it was trained with."""

    def begin(
        place: Path,
        settings: Mapping[str, object] | None = None,
        *,
        resume: Resume = "auto",
        allowed: tuple[str, ...] = (),
    ) -> Start:
        recipe = command.recipe({**SAVED, **(settings or {})})
        with begun(recipe, place, resume=resume, allowed=allowed) as start:
            return start

    return begin


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below `folder` and its time, but for who held the lock last."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def refused(begin: Callable[..., Start], place: Path, *how: Any, **options: Any) -> PithError:
    """How a run is refused, with nothing changed at its place or beside it."""
    before = contents(place.parent)
    with pytest.raises(PithError) as caught:
        begin(place, *how, **options)
    assert contents(place.parent) == before
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    return caught.value


def told(start: Start) -> str:
    return "\n".join(start.notices)


def metrics(place: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (place / "metrics.jsonl").read_text().splitlines()))


def steps(place: Path) -> list[int]:
    return [line["step"] for line in metrics(place) if "event" not in line]


def events(place: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(place) if line.get("event") == "resumed"]


def cut_to(size_of: Callable[[int], int]) -> Callable[[Path], str]:
    def spoil(path: Path) -> str:
        content = path.read_bytes()
        size = size_of(len(content))
        assert 0 <= size < len(content)
        path.write_bytes(content[:size])
        return f"found {size} bytes, wanted {len(content)} bytes"

    return spoil


def delete(path: Path) -> str:
    path.unlink()
    return "found no such file, wanted "


SPOILT: dict[str, Callable[[Path], str]] = {
    "cut to nothing": cut_to(lambda size: 0),
    "cut to one byte": cut_to(lambda size: 1),
    "cut to half": cut_to(lambda size: size // 2),
    "cut by one byte": cut_to(lambda size: size - 1),
    "deleted": delete,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", SPOILT)
def test_a_file_cut_or_deleted_in_the_only_checkpoint_is_named_and_nothing_starts(
    broken_off: Path, begin: Callable[..., Start], name: str, damage: str
) -> None:
    shutil.rmtree(broken_off / "checkpoints" / OLD)
    path = broken_off / "checkpoints" / NEW / name
    words = SPOILT[damage](path)
    if name == "manifest.json":
        words = "found no manifest.json" if damage == "deleted" else "its own sha256 does not hold"

    error = refused(begin, broken_off)

    assert error.code == "checkpoint.damaged"
    assert error.where == str(path.parent)
    assert f"{path}: " in str(error)
    assert words in str(error)
    named = refused(begin, broken_off.parent / "other", resume=path.parent)
    assert f"{path}: " in str(named)
    assert words in str(named)
    assert not (broken_off.parent / "other").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", SPOILT)
def test_a_damaged_checkpoint_is_told_and_set_aside_and_the_one_before_is_taken(
    broken_off: Path, begin: Callable[..., Start], name: str, damage: str
) -> None:
    folder = broken_off / "checkpoints"
    SPOILT[damage](folder / NEW / name)
    start = begin(broken_off)

    assert start.checkpoint == folder / OLD
    assert f"skipped {folder / NEW}: {folder / NEW / name}: found " in told(start)
    assert f"{folder / NEW} is kept as {NEW}.damaged" in told(start)
    assert not (folder / NEW).exists()
    left = {path.name for path in (folder / f"{NEW}.damaged").iterdir()}
    assert left == set(NAMES) - ({name} if damage == "deleted" else set())
    assert steps(broken_off) == [1, 2]
    (event,) = events(broken_off)
    assert (event["step"], event["dropped_steps"]) == (2, 2)
    assert event["checkpoint"] == str(folder / OLD)
    assert "is kept as" in "\n".join(event["notices"])


def test_several_damaged_files_are_all_faults(broken_off: Path, begin: Any) -> None:
    folder = broken_off / "checkpoints" / NEW
    shutil.rmtree(folder.with_name(OLD))
    for name in NAMES[:3]:
        cut_to(lambda size: size - 1)(folder / name)
    error = refused(begin, broken_off)
    assert {fault.where for fault in error.faults} == {str(folder / name) for name in NAMES[:3]}
    assert "and 2 more" in str(error)


LEFT: dict[str, Callable[[Path], None]] = {
    "a save killed before its manifest": lambda path: (path / "manifest.json").unlink(),
    "a save killed before its rename": lambda path: None,
    "an empty folder": lambda path: [f.unlink() for f in path.iterdir()] and None,
}


def forget_saves(run_dir: Path) -> None:
    """As if the run had been killed before its first save was complete."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"event": "checkpoint"' not in line))


@pytest.mark.parametrize("leftover", LEFT)
def test_what_a_killed_save_leaves_is_told_skipped_and_never_newest(
    broken_off: Path, begin: Any, leftover: str
) -> None:
    folder = broken_off / "checkpoints"
    temporary = folder / f"{NEW}.tmp"
    (folder / NEW).rename(temporary)
    LEFT[leftover](temporary)
    start = begin(broken_off)

    assert start.checkpoint == folder / OLD
    assert f"skipped {temporary}: " in told(start)
    assert "an interrupted save" in told(start)
    assert sorted(path.name for path in folder.glob("step-*")) == [OLD, f"{NEW}.tmp"]


def test_a_later_step_by_name_alone_is_not_newest(broken_off: Path, begin: Any) -> None:
    folder = broken_off / "checkpoints"
    (folder / "step-00000009").mkdir()
    shutil.copytree(folder / NEW, folder / "step-00000007")  # says step 4
    (folder / "step-8").mkdir()
    start = begin(broken_off)

    assert start.checkpoint == folder / NEW
    for name in ("step-00000009", "step-00000007", "step-8"):
        assert f"skipped {folder / name}: " in told(start)
    assert "found step 4, wanted step 7, as the folder's name" in told(start)
    aside = {path.name for path in folder.glob("*.damaged")}
    assert aside == {"step-00000007.damaged", "step-00000009.damaged"}


def test_leftovers_alone_start_the_run_at_its_first_step(broken_off: Path, begin: Any) -> None:
    folder = broken_off / "checkpoints"
    shutil.rmtree(folder / OLD)
    (folder / NEW).rename(folder / f"{NEW}.tmp")
    forget_saves(broken_off)
    start = begin(broken_off)

    assert (start.checkpoint, start.folder.path) == (None, broken_off)
    assert f"skipped {folder / NEW}.tmp" in told(start)
    assert steps(broken_off) == []
    (event,) = events(broken_off)
    assert (event["step"], event["dropped_steps"]) == (0, 4)


def test_a_run_killed_before_it_was_described_starts_in_the_same_folder(
    tmp_path: Path, begin: Any
) -> None:
    first = begin(tmp_path / "run")
    (first.folder.path / "config.toml").unlink()
    second = begin(tmp_path / "run")
    assert (second.folder.path, second.folder.id) == (first.folder.path, first.folder.id)
    assert second.checkpoint is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


FIXED: dict[str, tuple[dict[str, object], str, str]] = {  # settings, name, "found NOW, wanted THEN"
    "sequence length": (
        {"training.sequence_length": 64},
        "training.sequence_length",
        "found 64, wanted 32",
    ),
    "weights' seed": ({"training.seed": 7}, "training.seed", "found 7, wanted 0"),
    "order's seed": ({"data.seed": 7}, "data.seed", "found 7, wanted 0"),
    "validation share": ({"data.validation": 0.3}, "data.validation", "found 0.3, wanted 0.2"),
    "packing": ({"data.packing": "mask"}, "data.packing", "found 'mask', wanted 'none'"),
    "model": (
        {"model.fields.rope_theta": 5000.0},
        "model.fields.rope_theta",
        "found 5000",
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_what_makes_it_another_run_is_refused_with_both_values_and_allowed_by_name(
    broken_off: Path, begin: Any, case: str
) -> None:
    settings, name, values = FIXED[case]
    error = refused(begin, broken_off, settings)
    assert error.code == "resume.changed"
    assert name in error.what
    assert [fault.where for fault in error.faults] == [name]
    assert values in str(error.faults[0])
    assert "--allow-change" in error.next_step

    other = refused(begin, broken_off, settings, allowed=("optimizer.name",))
    assert [fault.where for fault in other.faults] == [name]

    start = begin(broken_off, settings, allowed=(name,))
    assert start.checkpoint == broken_off / "checkpoints" / NEW
    assert f"resumes with {name} " in told(start)
    assert (broken_off / "config-1.toml").exists()


def test_all_that_differs_is_told_at_once_and_each_must_be_allowed(
    broken_off: Path, begin: Any
) -> None:
    settings = {name: value for change, *_ in FIXED.values() for name, value in change.items()}
    error = refused(begin, broken_off, settings)
    assert {fault.where for fault in error.faults} == set(settings)

    error = refused(begin, broken_off, settings, allowed=("model.fields", "training.seed"))
    named = {fault.where for fault in error.faults}
    assert named == set(settings) - {"model.fields.rope_theta", "training.seed"}

    start = begin(broken_off, settings, allowed=tuple(settings))
    assert all(f"resumes with {name} " in told(start) for name in settings)


def test_a_name_that_allows_nothing_is_refused_with_what_is_near(
    broken_off: Path, begin: Any
) -> None:
    error = refused(begin, broken_off, allowed=("training.sed",))
    assert "training.seed" in str(error.faults[0])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, command: Any) -> dict[str, Path]:
    """The same tokens elsewhere, other tokens, and the same tokens by another tokenizer."""
    base = tmp_path_factory.mktemp("corpora")
    found = {"moved": Path(shutil.copytree(command.corpus, base / "moved"))}
    texts = base / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": DOCUMENT[::-1]}) + "\n" for _ in range(10)))
    tokenize([str(texts)], out=base / "other", workers=1)
    return {**found, "other": base / "other"}


def test_a_corpus_that_moved_is_announced_and_another_one_is_refused_by_fingerprint(
    broken_off: Path, begin: Any, corpora: dict[str, Path]
) -> None:
    error = refused(begin, broken_off, {"data.corpus": corpora["other"]})
    (fault,) = error.faults
    assert fault.where == "data.corpus"
    assert fault.wanted.strip("'\"") in read(broken_off / "checkpoints" / NEW).corpus
    assert fault.found != fault.wanted

    start = begin(broken_off, {"data.corpus": corpora["moved"]})
    assert "resumes with data.corpus (path) " in told(start)
    allowed = begin(broken_off, {"data.corpus": corpora["other"]}, allowed=("data.corpus",))
    assert "resumes with data.corpus " in told(allowed)


def test_another_tokenizer_is_refused_and_allowed_by_name(
    broken_off: Path, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pith.data.loader.Loader.tokenizer", "another one")
    error = refused(begin, broken_off)
    (fault,) = error.faults
    assert (fault.where, fault.found) == ("data.tokenizer", "'another one'")
    assert begin(broken_off, allowed=("data.tokenizer",)).checkpoint


def test_what_may_change_is_announced_in_words_and_in_the_metrics(
    broken_off: Path, begin: Any
) -> None:
    settings = {
        "optimizer.lr": 5e-3,
        "training.steps": 8,
        "parallel.schedule": "1f1b",
        "parallel.pp": 1,
        "training.global_batch_size": 16,
    }
    start = begin(broken_off, settings)
    assert start.checkpoint == broken_off / "checkpoints" / NEW
    for line in (
        "optimizer.lr 0.01 -> 0.005",
        "training.steps 4 -> 8",
        "parallel.pp 2 -> 1",
        "training.global_batch_size 8 -> 16",
    ):
        assert f"resumes with {line}" in told(start)
    assert "resumes with parallel.schedule " in told(start)
    (event,) = events(broken_off)
    assert all(notice in told(start) for notice in event["notices"])
    assert len(event["notices"]) >= 5


@pytest.mark.parametrize("is_finished", [True, False])
def test_fewer_steps_than_were_taken_are_refused(
    place: Path, begin: Any, is_finished: bool
) -> None:
    if not is_finished:
        (place / "report.json").unlink()
    error = refused(begin, place, {"training.steps": 3})
    assert error.code == "resume.steps"
    assert (error.found, error.wanted) == ("training.steps 3", "4 or more")


@pytest.mark.parametrize("report", ["", "{", "[]", "{}", '{"steps": "4"}'])
def test_a_report_that_is_not_whole_is_none(place: Path, begin: Any, report: str) -> None:
    (place / "report.json").write_text(report)
    start = begin(place)
    assert (start.finished, start.checkpoint) == (None, place / "checkpoints" / NEW)


def test_a_finished_run_is_said_to_be_finished_and_nothing_changes(place: Path, begin: Any) -> None:
    before = contents(place)
    start = begin(place)
    assert start.finished == json.loads((place / "report.json").read_text())
    assert start.checkpoint is None
    shutil.rmtree(place / "checkpoints" / OLD)
    shutil.rmtree(place / "checkpoints" / NEW)
    assert begin(place).finished == start.finished
    left = contents(place)
    assert left == {name: it for name, it in before.items() if not name.startswith("checkpoints/s")}


@pytest.mark.parametrize("num_steps", [3, 8])
def test_a_finished_run_whose_checkpoints_are_gone_neither_goes_on_nor_starts_anew(
    place: Path, begin: Any, num_steps: int
) -> None:
    shutil.rmtree(place / "checkpoints")
    assert refused(begin, place, {"training.steps": num_steps}).code == "resume.gone"


def test_more_steps_go_on_with_a_finished_run(place: Path, begin: Any) -> None:
    start = begin(place, {"training.steps": 6})
    assert (start.finished, start.checkpoint) == (None, place / "checkpoints" / NEW)
    assert "resumes with training.steps 4 -> 6" in told(start)
    assert steps(place) == [1, 2, 3, 4]
    assert "steps = 4" in (place / "config-1.toml").read_text()
    assert "steps = 6" in (place / "config.toml").read_text()


def test_never_starts_anew_beside_the_run_and_leaves_it_alone(place: Path, begin: Any) -> None:
    before = contents(place)
    start = begin(place, resume="never")
    assert (start.folder.path, start.checkpoint) == (place.with_name("run-2"), None)
    assert contents(place) == before


@pytest.mark.parametrize("part", ["", "checkpoints", f"checkpoints/{OLD}"])
def test_a_path_begins_a_run_of_its_own_and_the_same_path_goes_on_with_it(
    place: Path, begin: Any, part: str
) -> None:
    before, settings = contents(place), {"training.steps": 6}
    checkpoint = place / "checkpoints" / (OLD if OLD in part else NEW)
    first = begin(place.with_name("branch"), settings, resume=place / part)
    assert first.checkpoint == checkpoint
    assert first.folder.path == place.with_name("branch")
    assert first.folder.origin == str(checkpoint)
    assert events(first.folder.path)[0]["checkpoint"] == str(checkpoint)

    second = begin(place.with_name("branch"), settings, resume=place / part)
    assert (second.folder.path, second.folder.id) == (first.folder.path, first.folder.id)
    assert second.checkpoint == checkpoint
    assert begin(place.with_name("branch"), settings).checkpoint == checkpoint
    beside = [begin(place, settings, resume=place / part).folder.path for _ in range(2)]
    assert beside == [place.with_name("run-2")] * 2
    assert contents(place) == before


def test_a_path_that_is_no_whole_checkpoint_is_refused_and_nothing_is_made(
    place: Path, begin: Any
) -> None:
    other = place.with_name("other")
    (place / "empty").mkdir()
    for path in (place / "none", place / "empty", place / "config.toml"):
        error = refused(begin, other, resume=path)
        assert str(path) in str(error)
    for name in (OLD, NEW):
        delete(place / "checkpoints" / name / "__0_0.distcp")
    for path in (place, place / "checkpoints", place / "checkpoints" / NEW):
        error = refused(begin, other, resume=path)
        assert str(path) in str(error)
    assert not other.exists()


def test_a_checkpoint_of_another_model_is_refused_with_every_tensor(
    broken_off: Path, begin: Any
) -> None:
    settings = {"model.fields.moe_intermediate_size": 24, "model.fields.num_hidden_layers": 3}
    error = refused(begin, broken_off, settings, allowed=("model.fields",))
    assert error.code == "resume.tensors"
    named = {fault.where: fault for fault in error.faults}
    experts = named["optimizer.exp_avg.layers.0.mlp.experts.gate_proj.weight"]
    assert (experts.found, experts.wanted) == ("float32 [4, 16, 32]", "float32 [4, 24, 32]")
    gone = [fault for name, fault in named.items() if ".layers.3." in name]
    assert gone
    assert {fault.wanted for fault in gone} == {"nothing"}
    kinds = {name.partition(".layers.")[0] for name in named}
    assert kinds == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}


def test_checkpoints_are_found_where_they_lay_until_there_are_some_elsewhere(
    broken_off: Path, begin: Any
) -> None:
    settings = {"checkpoint.directory": broken_off.with_name("elsewhere"), "training.steps": 6}
    for _ in range(2):  # killed before it has saved elsewhere: it must not lose what it has
        start = begin(broken_off, settings)
        assert start.checkpoint == broken_off / "checkpoints" / NEW
        assert steps(broken_off) == [1, 2, 3, 4]
    owner = json.loads((broken_off.with_name("elsewhere") / "owner.json").read_text())
    assert owner["run"] == start.folder.id


def test_a_folder_with_checkpoints_of_another_run_is_refused(place: Path, begin: Any) -> None:
    error = refused(begin, place.with_name("b"), {"checkpoint.directory": place / "checkpoints"})
    assert error.code == "checkpoint.owned"
    assert not place.with_name("b").exists()


def test_a_run_that_was_killed_before_its_first_save_starts_at_step_1_again(
    broken_off: Path, begin: Any
) -> None:
    shutil.rmtree(broken_off / "checkpoints")
    forget_saves(broken_off)
    start = begin(broken_off)
    assert (start.checkpoint, start.folder.path) == (None, broken_off)
    assert "resumes at step 0, no checkpoint" in told(start)
    assert steps(broken_off) == []


def test_a_run_whose_checkpoints_are_gone_never_starts_anew_in_its_folder(
    broken_off: Path, begin: Any
) -> None:
    shutil.rmtree(broken_off / "checkpoints")
    before = (broken_off / "metrics.jsonl").read_bytes()
    assert refused(begin, broken_off).code == "resume.gone"
    assert (broken_off / "metrics.jsonl").read_bytes() == before


def test_a_copied_run_folder_goes_on_by_itself(broken_off: Path, trained: Path, begin: Any) -> None:
    before = contents(trained)
    start = begin(broken_off, {"training.steps": 6})
    assert start.folder.path == broken_off
    assert start.checkpoint == broken_off / "checkpoints" / NEW
    assert contents(trained) == before
