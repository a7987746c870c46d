"""R13: what one layout saved, every other one loads, to the last bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.checkpoint.manifest import Position
from pith.checkpoint.saver import Saver, open_group
from pith.checkpoint.shelf import Shelf
from pith.checkpoint.store import read_whole
from pith.config import Recipe
from pith.train.state import START, after, pieces, restore
from pith.train.step import Trainer
from tests.checkpoint.by_hand import bare_manifest
from tests.train.parity import random_batch, recipe, trainer_of

SEQUENCES = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"pp": 1, "schedule": "1f1b-pair"},
    "pp 2, V": {"pp": 2, "schedule": "dualpipev"},
    "pp 2, loop": {"pp": 2, "schedule": "1f1b"},
    "ep 2": {"pp": 1, "ep": 2, "schedule": "gpipe"},
    "dp 2": {"pp": 1, "dp": 2, "schedule": "gpipe"},
    "pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipev"},
    "dp 2, ep 2, splits": {"pp": 1, "dp": 2, "ep": 2, "schedule": "1f1b", "exchange": "splits"},
    "hsdp, 2 copies": {"pp": 1, "dp": 4, "dp_shard": 2, "schedule": "gpipe"},
    "pp 4": {"pp": 4, "schedule": "zb-h1"},
}
TIED = ("one process", "pp 2, V", "pp 2, loop", "hsdp, 2 copies")


def recipe_of(layout: str, *, tied: bool) -> Recipe:
    axes = LAYOUTS[layout]
    data_ranks = axes.get("dp", 1) * axes.get("ep", 1)
    return recipe(
        micro_batches=SEQUENCES // (2 * data_ranks),
        precision="float32",
        tie_word_embeddings=tied,
        num_hidden_layers=3,
        **axes,
    )


def num_ranks(layout: str) -> int:
    axes = LAYOUTS[layout]
    return math.prod(axes.get(axis, 1) for axis in ("pp", "dp", "ep"))


def save(trainer: Trainer, folder: Path, position: Position) -> None:
    group = open_group(trainer.world)
    how = {"world": trainer.world, "group": group, "keep": 0, "asynchronous": False}
    with Saver(Shelf(folder), pieces(trainer.model), **how) as saver:
        saver.save(bare_manifest(position))


def next_loss(trainer: Trainer) -> float:
    return trainer.step(2, random_batch(SEQUENCES, seed=2).take(trainer.rows)).loss


def save_all(layouts: list[str], base: Path, tied: bool) -> dict[str, float]:
    """Two steps in each of the layouts, a checkpoint, and the loss of the next step."""
    losses = {}
    for layout in layouts:
        with trainer_of(recipe_of(layout, tied=tied)) as trainer:
            position = START
            for index in range(2):
                batch = random_batch(SEQUENCES, seed=index).take(trainer.rows)
                position = after(position, trainer.step(index, batch), num_samples=SEQUENCES)
            save(trainer, base / layout, position)
            losses[layout] = next_loss(trainer)
    return losses


def load_all(
    layouts: list[str], saved: dict[str, dict[str, Tensor]], base: Path, tied: bool
) -> dict[tuple[str, str], float]:
    """Load each of the checkpoints in each of the layouts; every rank compares the bits.

    Of its own and of the last of them a layout also takes the next step, and returns its loss; and
    it saves the last one again.
    """
    losses, last = {}, list(saved)[-1]
    for layout in layouts:
        with trainer_of(recipe_of(layout, tied=tied)) as trainer:
            for name, whole in saved.items():
                for piece in pieces(trainer.model).values():
                    piece.rows.fill_(math.nan)  # what is not loaded is seen
                (found,) = Shelf(base / name).find()
                assert found.manifest is not None
                restore(trainer.model, found.path, found.manifest)
                for key, piece in pieces(trainer.model).items():
                    rows = whole[key][piece.first_row :][: len(piece.rows)]
                    assert torch.equal(piece.rows, rows), f"{key} of {name} in {layout}"
                if name == last:
                    save(trainer, base / f"again by {layout}", found.manifest.position)
                if name in (layout, last):
                    losses[name, layout] = next_loss(trainer)
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["head of its own", "tied head"])
def test_every_layout_loads_what_every_other_one_saved(
    run_ranks: Any, tmp_path: Path, tied: bool
) -> None:
    layouts = [name for name in LAYOUTS if not tied or name in TIED]
    by_world: dict[int, list[str]] = {}
    for name in layouts:
        by_world.setdefault(num_ranks(name), []).append(name)
    losses: dict[str, float] = {}
    for world, names in by_world.items():
        losses |= run_ranks(world, save_all, names, tmp_path, tied)[0]
    spread = max(losses.values()) / min(losses.values())
    assert spread == pytest.approx(1, rel=1e-4), "the layouts should train alike"

    saved = {name: read_whole(tmp_path / name / "step-00000002") for name in layouts}
    again: dict[tuple[str, str], float] = {}
    for world, names in by_world.items():
        again |= run_ranks(world, load_all, names, saved, tmp_path, tied)[0]
    assert len(again) == 2 * len(layouts) - 1
    for layout in layouts:
        wanted = saved[layouts[-1]]
        found = read_whole(tmp_path / f"again by {layout}" / "step-00000002")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), layout
    for wanted in saved.values():
        moments = [key for key in wanted if key.startswith("optimizer.")]
        assert len(moments) == 2 * len([key for key in wanted if key.startswith("model.")])
        assert all(bool(wanted[key].any()) for key in moments), "a moment is empty"
    for (name, layout), loss in again.items():
        assert loss == pytest.approx(losses[name], rel=1e-6), f"{name} by {layout}"
