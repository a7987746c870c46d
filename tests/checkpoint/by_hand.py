"""Checkpoint folders made by hand: small files that hold no tensor, under a true manifest."""

import json
from pathlib import Path

from pith.checkpoint.manifest import Manifest, Position, TensorEntry, describe
from pith.checkpoint.shelf import Shelf

TENSORS = {
    "model.embed": TensorEntry(shape=(8, 4), dtype="float32"),
    "model.norm": TensorEntry(shape=(4,), dtype="bfloat16"),
    "optimizer.exp_avg.embed": TensorEntry(shape=(8, 4), dtype="float32"),
    "optimizer.exp_avg_sq.embed": TensorEntry(shape=(8, 4), dtype="float32"),
}


def manifest_of(folder: Path, *, step: int, run: str = "run-1", loss: float = 2.5) -> Manifest:
    """The manifest of the files in `folder`."""
    return Manifest(
        run=run,
        position=Position(
            step=step, samples=8 * step, updates=step, skips=0, first_loss=5.5, last_loss=loss
        ),
        recipe={"name": "tiny", "training": {"steps": 70, "lr": 3e-4, "note": None}},
        layout={"pp": 2, "dp": 1, "cp": 1, "ep": 2},
        corpus="c" * 64,
        tokenizer="t" * 64,
        versions={"pith": "0.1", "torch": "2.13"},
        tensors=TENSORS,
        files=tuple(describe(path) for path in sorted(folder.iterdir())),
    )


def bare_manifest(position: Position) -> Manifest:
    """What a saver is given: it fills in tensors and files itself."""
    return Manifest(
        run="run-1",
        position=position,
        recipe={},
        layout={},
        corpus="",
        tokenizer="",
        versions={},
        tensors={},
        files=(),
    )


def begin(directory: Path, step: int) -> Path:
    """An interrupted save: every file but the manifest."""
    folder = Shelf(directory).begin(step)
    (folder / ".metadata").write_bytes(bytes(range(40)))
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([step % 256, rank]) * (60 + rank))
    return folder


def save(directory: Path, step: int, *, run: str = "run-1", loss: float = 2.5) -> Path:
    """A complete checkpoint."""
    folder = begin(directory, step)
    manifest = manifest_of(folder, step=step, run=run, loss=loss)
    return Shelf(directory).commit(step, manifest)


def leftovers(directory: Path) -> dict[str, str]:
    """What deaths and people leave: the name of each, and a word of the reason it is not taken."""
    directory.mkdir(parents=True, exist_ok=True)
    begin(directory, 10)
    (directory / "step-00000011").mkdir()
    begin(directory, 12).rename(directory / "step-00000012")
    (save(directory, 13) / "__1_0.distcp").unlink()
    (directory / "step-abc").mkdir()
    (directory / "step-00000014").write_text("a plain file")
    save(directory, 15).rename(directory / "step-00000015.damaged-2")
    save(directory, 16).rename(directory / "step-00000017")
    begin(directory, 18).rename(directory / "step-00000018-tmp")
    save(directory, 19).rename(directory / "step-19")
    (directory / "step-00000020").symlink_to(directory / "gone")
    (directory / "owner.json").write_text(json.dumps({"run": "run-1", "run_dir": "runs/tiny"}))
    (directory / "notes.txt").write_text("nobody's business")
    return {
        "step-00000010.tmp": "interrupted save",
        "step-00000011": "empty folder",
        "step-00000012": "no manifest.json",
        "step-00000013": "__1_0.distcp: found no such file, wanted 122 bytes",
        "step-abc": "the name step-abc",
        "step-00000014": "no folder",
        "step-00000015.damaged-2": "set aside",
        "step-00000017": "manifest.json: found step 16, wanted step 17",
        "step-00000018-tmp": "the name step-00000018-tmp",
        "step-19": "the name step-19",
        "step-00000020": "no folder",
    }
