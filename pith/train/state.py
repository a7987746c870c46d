"""A run's state as a checkpoint holds it: tensors by canonical name, everything else as JSON.

    model.NAME                  master weights
    optimizer.exp_avg.NAME      first moments, in the shape of the weight
    optimizer.exp_avg_sq.NAME   second moments

Experts are stacked on the first axis. No name depends on the layout, so any layout loads them. A
step draws no random numbers, so there is no state of a generator to keep.
"""

import math
from pathlib import Path

import torch

import pith
from pith.checkpoint.manifest import Manifest, Position, TensorEntry
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import load
from pith.config import Recipe
from pith.data.loader import Loader
from pith.errors import Fault, RequestError, first_of
from pith.ops.precision import wide
from pith.plan.mesh import Mesh
from pith.run.job import Job
from pith.train.build import DTYPES, Model
from pith.train.optim import MOMENTS, moments, set_num_updates
from pith.train.step import StepResult

START = Position(step=0, samples=0, updates=0, skips=0, first_loss=None, last_loss=None)
KINDS = ("model", *(f"optimizer.{moment}" for moment in MOMENTS))


def pieces(model: Model) -> dict[str, Piece]:
    """This rank's rows of every tensor that a checkpoint holds, as they are and will be."""
    shapes = {spec.name: spec.shape for spec in model.architecture.parameters()}
    parameters = model.parameters
    found = {}
    for name, master in parameters.masters.items():
        tensors = (master, *moments(model.optimizer, master).values())
        for kind, rows in zip(KINDS, tensors, strict=True):
            found[f"{kind}.{name}"] = Piece(
                rows=rows,
                first_row=parameters.first_rows[name],
                shape=shapes[name],
                owned=name in parameters.counted,
            )
    return found


def restore(model: Model, folder: Path, manifest: Manifest) -> None:
    """Fill weights and optimizer from the checkpoint in `folder`.

    Raises RequestError as `load` does.
    """
    load(pieces(model), folder)
    set_num_updates(model.optimizer, manifest.position.updates)


def after(position: Position, result: StepResult, *, num_samples: int) -> Position:
    """Where a run stands after one more step."""
    loss = result.loss if math.isfinite(result.loss) else None
    return Position(
        step=position.step + 1,
        samples=position.samples + num_samples,
        updates=position.updates + result.updated,
        skips=0 if result.updated else position.skips + 1,
        first_loss=loss if position.step == 0 else position.first_loss,
        last_loss=loss,
    )


def manifest_of(
    position: Position, *, job: Job, recipe: Recipe, mesh: Mesh, loader: Loader
) -> Manifest:
    """What a checkpoint at `position` says beside its tensors and files, which come later."""
    return Manifest(
        run=job.run_id,
        position=position,
        recipe=recipe.model_dump(mode="json"),
        layout={"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep},
        corpus=loader.fingerprint,
        tokenizer=loader.tokenizer,
        versions={"pith": pith.__version__, "torch": torch.__version__},
        tensors={},
        files=(),
    )


def refuse_other_tensors(recipe: Recipe, manifest: Manifest, *, where: Path) -> None:
    """Raises RequestError with every tensor in which checkpoint and model differ."""
    dtype = str(wide(DTYPES[recipe.training.precision])).removeprefix("torch.")
    wanted = {
        f"{kind}.{spec.name}": TensorEntry(shape=spec.shape, dtype=dtype)
        for spec in recipe.architecture.parameters()
        for kind in KINDS
    }
    faults = tuple(
        Fault(name, _told(manifest.tensors.get(name)), _told(wanted.get(name)))
        for name in sorted(wanted.keys() | manifest.tensors.keys())
        if wanted.get(name) != manifest.tensors.get(name)
    )
    if faults:
        raise RequestError(
            "resume.tensors",
            what="the checkpoint is one of another model",
            found=first_of(faults),
            wanted="the tensors of the recipe's model and optimizer",
            where=str(where),
            next_step="resume with the recipe of the checkpoint, or --resume never",
            faults=faults,
        )


def _told(entry: TensorEntry | None) -> str:
    return "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
