"""Where a run starts: a new folder, or one that is there with the newest complete checkpoint.

All of it happens in one process, before a rank is started.
"""

import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pith.checkpoint.manifest import Manifest, Position, faults, read
from pith.checkpoint.shelf import Found, Shelf
from pith.config import Recipe
from pith.config.changes import Change, changes, refuse_fixed, text
from pith.data.loader import Loader, prepare
from pith.errors import Fault, PithError, RequestError, first_of
from pith.run.folder import RunFolder
from pith.run.metrics import MetricsLog, read_events, rewind
from pith.train.state import START, refuse_other_tensors

Resume = Literal["auto", "never"] | Path


@dataclass(frozen=True, slots=True)
class Start:
    """A run that may begin. `finished` is the summary of one that has nothing left to do."""

    folder: RunFolder
    checkpoint: Path | None = None  # to resume from; None: initial weights
    finished: Mapping[str, Any] | None = None
    notices: tuple[str, ...] = ()


@contextmanager
def begun(
    recipe: Recipe,
    place: Path,
    *,
    resume: Resume,
    allowed: Sequence[str] = (),
    facts: Mapping[str, object] | None = None,
) -> Iterator[Start]:
    """The run of `recipe` in the folder `place`, or in a numbered sibling; ours while it lasts.

    auto goes on with the run in `place`, never begins a new one, a path begins one with that
    checkpoint and goes on with what has begun so. `allowed` names what may differ from the
    checkpoint although it should not. `facts` go into environment.json.

    Raises RequestError where the folder is in use, the checkpoints are damaged, the recipe differs
    in what must not change or the data cannot serve; nothing is changed then.
    """
    source = _source(resume) if isinstance(resume, Path) else None
    origin = str(source) if source else None
    found = None if resume == "never" else RunFolder.find(place.parent, place.name, origin=origin)
    folder = found or RunFolder.create(place.parent, place.name, origin=origin)
    with folder.lock() as unlocked:
        notices = tuple(filter(None, (folder.notice, unlocked)))
        try:
            start = _start(recipe, folder, is_new=found is None, allowed=allowed, facts=facts or {})
        except PithError:
            if found is None:
                shutil.rmtree(folder.path)
            raise
        yield replace(start, notices=(*notices, *start.notices))


def open_data(
    recipe: Recipe, *, work_dir: Path, verify: bool, position: Position = START
) -> Loader:
    """The run's data, checked before the first step. Raises RequestError where it cannot serve.

    A text is tokenized under `work_dir`, once. `verify` reads a whole corpus against its checksums.
    `position` is where the run stands.
    """
    corpus = prepare(recipe.data.corpus, work_dir=work_dir / "corpus", verify=verify)
    corpus.check_vocabulary(recipe.architecture.vocab_size)
    loader = Loader(
        corpus,
        sequence_length=recipe.training.sequence_length,
        global_batch_size=recipe.training.global_batch_size,
        seed=recipe.data.seed,
        validation_fraction=recipe.data.validation,
        packing=recipe.data.packing,
        epochs=recipe.data.epochs,
    )
    loader.check(recipe.training.steps - position.step, first_sample=position.samples)
    return loader


def shelf_of(recipe: Recipe, folder: RunFolder) -> Shelf:
    """Where the checkpoints of a run in `folder` lie."""
    return Shelf(Path(recipe.checkpoint.directory or folder.checkpoints).absolute())


def _source(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one of the run or the folder at `path`."""
    for directory in (path / "checkpoints", path):
        steps = [found for found in Shelf(directory).find() if found.step is not None]
        if complete := [found for found in steps if found.complete]:
            return complete[-1].path.absolute()
        if steps:
            raise damaged(steps[-1].path, steps[-1].faults)
    _require_whole(path.absolute())
    return path.absolute()


def _require_whole(folder: Path) -> Manifest:
    """What the checkpoint in `folder` says. Raises RequestError where a file has another size."""
    manifest = read(folder)
    if found := faults(folder, manifest, checksums=False):
        raise damaged(folder, found)
    return manifest


def damaged(folder: Path, found: Sequence[Fault]) -> RequestError:
    """The error of a checkpoint that is not what was saved."""
    return RequestError(
        "checkpoint.damaged",
        what="the checkpoint is not what was saved; nothing was loaded",
        found=first_of(found),
        wanted="every file as its manifest says",
        where=str(folder),
        next_step="move it away to resume from the one before, or --resume never",
        faults=tuple(found),
    )


def _start(
    recipe: Recipe,
    folder: RunFolder,
    *,
    is_new: bool,
    allowed: Sequence[str],
    facts: Mapping[str, object],
) -> Start:
    before = None if is_new else _recipe_of(folder)
    finished = None if is_new else folder.read_finished()
    newest, told = _newest(recipe, folder)
    checkpoint = newest.path if newest else Path(folder.origin) if folder.origin else None
    manifest = _require_whole(checkpoint) if checkpoint else None
    position = manifest.position if manifest else START
    if finished is not None and manifest is None and finished["steps"] != recipe.training.steps:
        raise _gone(folder)
    announced = _changed_recipe(recipe, before, manifest, allowed=allowed, where=folder.path)
    if finished is not None and finished["steps"] == recipe.training.steps:
        late = tuple(f"too late to change {text(change)}" for change in announced)
        return Start(folder, finished=finished, notices=late)
    if newest is None and _has_saved(folder.metrics):
        raise _gone(folder)
    if position.step > recipe.training.steps:
        raise _too_far(position.step, recipe, where=checkpoint)
    loader = open_data(recipe, work_dir=folder.path, verify=False, position=position)
    if manifest is not None and checkpoint is not None:
        announced += _changed_data(loader, manifest, allowed=allowed, where=folder.path)
        refuse_other_tensors(recipe, manifest, where=checkpoint)

    shelf = shelf_of(recipe, folder)
    shelf.claim(folder.id, str(folder.path))
    moved = shelf.set_aside(position.step)
    folder.describe(recipe.to_toml(), facts)
    notices = [
        *told,
        *(f"{old} is kept as {new.name}" for old, new in moved),
        *(f"resumes with {text(change)}" for change in announced),
    ]
    if not is_new or checkpoint is not None:
        dropped = rewind(folder.metrics, step=position.step)
        place = f"step {position.step}, {checkpoint}" if checkpoint else "step 0, no checkpoint"
        notices.append(f"run folder {folder.path}: resumes at {place}")
        with MetricsLog(folder.metrics) as log:
            log.event(
                "resumed",
                step=position.step,
                checkpoint=str(checkpoint) if checkpoint else None,
                dropped_steps=dropped,
                notices=notices,
            )
    else:
        notices.append(f"run folder {folder.path}")
    return Start(folder, checkpoint, notices=tuple(notices))


def _recipe_of(folder: RunFolder) -> Recipe | None:
    """What the run in `folder` was last begun with; None where it was killed before that."""
    written = folder.recipe_toml
    if written is None:
        return None
    try:
        return Recipe.parse(written)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(
            "run.folder",
            what="the recipe of this run cannot be read",
            found=str(error),
            wanted="the config.toml that was written here",
            where=str(folder.path / "config.toml"),
            next_step="put it back, or --resume never",
        ) from error


def _newest(recipe: Recipe, folder: RunFolder) -> tuple[Found | None, list[str]]:
    """The newest complete checkpoint of the run, and what else lies there.

    Raises RequestError where checkpoints are there, and none of them is complete.
    """
    places = {shelf_of(recipe, folder).path, folder.checkpoints.absolute()}
    for config in folder.path.glob("config*.toml"):  # the recipe may have named another place
        directory = tomllib.loads(config.read_text()).get("checkpoint", {}).get("directory")
        places |= {Path(directory)} if directory else set()
    found = [entry for place in sorted(places) for entry in Shelf(place).find()]
    own = [entry for entry in found if entry.manifest and entry.manifest.run == folder.id]
    newest = max((entry for entry in own if entry.complete), key=_step, default=None)
    broken = [entry for entry in found if not entry.complete]
    lost = [entry for entry in broken if entry.step is not None]
    if newest is None and lost:
        last = max(lost, key=_step)
        raise damaged(last.path, last.faults)
    told = [f"skipped {entry.path}: {'; '.join(map(str, entry.faults))}" for entry in broken]
    return newest, told


def _step(found: Found) -> int:
    return found.step if found.step is not None else -1


def _changed_recipe(
    recipe: Recipe,
    before: Recipe | None,
    manifest: Manifest | None,
    *,
    allowed: Sequence[str],
    where: Path,
) -> tuple[Change, ...]:
    """Where the recipe differs from the run so far. Raises RequestError for what must not."""
    now = recipe.model_dump(mode="json")
    then = manifest.recipe if manifest else before.model_dump(mode="json") if before else now
    return refuse_fixed(changes(then, now), allowed=allowed, where=str(where))


def _changed_data(
    loader: Loader, manifest: Manifest, *, allowed: Sequence[str], where: Path
) -> tuple[Change, ...]:
    """Where the data differ from the run so far. Raises RequestError unless that is allowed."""
    compared = (
        ("data.corpus", manifest.corpus, loader.fingerprint),
        ("data.tokenizer", manifest.tokenizer, loader.tokenizer),
    )
    found = [Change(name, then, now) for name, then, now in compared if then != now]
    return refuse_fixed(found, allowed=allowed, where=str(where))


def _has_saved(metrics: Path) -> bool:
    """Whether a checkpoint was complete: one of the background is, once the next one begins."""
    saves = read_events(metrics, "checkpoint")
    return len(saves) > any(save.get("asynchronous") for save in saves)


def _gone(folder: RunFolder) -> RequestError:
    return RequestError(
        "resume.gone",
        what="the checkpoints of this run are gone, so it cannot go on",
        found="no complete checkpoint",
        wanted="those that metrics.jsonl tells of",
        where=str(folder.path),
        next_step="put them back, or --resume never to start anew",
    )


def _too_far(step: int, recipe: Recipe, *, where: Path | None) -> RequestError:
    return RequestError(
        "resume.steps",
        what="this run has gone further than the recipe asks for",
        found=f"training.steps {recipe.training.steps}",
        wanted=f"{step} or more",
        where=str(where),
        next_step=f"--set training.steps={step}, or --resume never",
    )
