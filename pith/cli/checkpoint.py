"""`pith checkpoint`: what is saved, whether it is still what was saved, and what it says."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pith.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, faults
from pith.checkpoint.shelf import Found, Shelf, look, step_of
from pith.cli.output import check_out, emit
from pith.errors import Fault, RequestError
from pith.report import Check, Report

CHECKPOINTS = "checkpoints"  # where a run folder keeps them

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the same JSON to this file.")]
Place = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run folder, a checkpoints folder, a checkpoint.")
]


def checkpoint_app() -> typer.Typer:
    """The commands under `pith checkpoint`."""
    app = typer.Typer(help="Checkpoints: what is there, whether it is whole, what it says.")
    app.command("list")(list_command)
    app.command("verify")(verify_command)
    app.command("inspect")(inspect_command)
    return app


def list_command(path: Place, *, json: Json = False, out: Out = None) -> None:
    """List checkpoints and what interrupted saves left; exit 1 when none is complete."""
    check_out(out)
    found = _find(path)
    newest = max((f.path for f in found if f.complete), key=_step, default=None)
    summaries = [_summary(entry) for entry in found]
    text = "\n".join(map(_line, summaries)) or f"{path}: no checkpoint here"
    report = Report(
        "checkpoint list",
        exit=0 if newest else 1,
        data={"checkpoints": summaries, "newest": str(newest) if newest else None},
        next=(_command("verify", newest),) if newest else (),
    )
    emit(report, json=json, out=out, text=text)
    raise typer.Exit(report.exit)


def verify_command(path: Place, *, json: Json = False, out: Out = None) -> None:
    """Read every file of a checkpoint, or of all in a folder, against what was written."""
    check_out(out)
    there = _find(path)
    found = [entry for entry in there if entry.step is not None]
    if not found:
        raise _none(path, wanted="a checkpoint", found="; ".join(map(_reasons, there)))
    faults_of = {str(entry.path): _all_faults(entry) for entry in found}
    checks = tuple(_check(entry, faults_of[str(entry.path)]) for entry in found)
    report = Report(
        "checkpoint verify",
        exit=0 if all(check.ok for check in checks) else 1,
        checks=checks,
        data={
            "checkpoints": [
                {"path": where, "ok": not wrong, "faults": [_plain_fault(f) for f in wrong]}
                for where, wrong in faults_of.items()
            ]
        },
        next=(_command("list", path),),
    )
    lines = (f"{c.where}: {'held' if c.ok else 'DAMAGED'}: {c.found}" for c in checks)
    emit(report, json=json, out=out, text="\n".join(lines))
    raise typer.Exit(report.exit)


def inspect_command(
    path: Place,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor by name.")] = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Show what a checkpoint says of itself; of a folder of them, the newest complete one."""
    check_out(out)
    found = look(_plain(path)) if _is_checkpoint(path) else _newest(path)
    if found.manifest is None:
        raise _none(path, wanted="a checkpoint with a manifest", found=_reasons(found))
    manifest, kinds = found.manifest, _kinds(found.manifest.tensors)
    data = manifest.model_dump(mode="json")
    data |= {"path": str(found.path), "complete": found.complete, "kinds": kinds}
    check = Check("complete", found.complete, _reasons(found), where=str(found.path))
    report = Report(
        "checkpoint inspect",
        exit=0 if found.complete else 1,
        checks=(check,),
        data=data,
        next=(_command("verify", found.path),),
    )
    lines = [*_words(found, manifest, kinds), *(_rows(manifest.tensors) if tensors else ())]
    emit(report, json=json, out=out, text="\n".join(lines))
    raise typer.Exit(report.exit)


def _find(path: Path) -> list[Found]:
    """The checkpoint at `path`, or everything in the folder there that looks like one."""
    return [look(_plain(path))] if _is_checkpoint(path) else _shelf(path).find()


def _newest(path: Path) -> Found:
    shelf = _shelf(path)
    if (newest := shelf.newest()) is None:
        raise _none(shelf.path, wanted="a complete checkpoint")
    return newest


def _shelf(path: Path) -> Shelf:
    """The checkpoints of the run folder `path`, or in `path` itself."""
    try:
        if not path.exists():
            raise _none(path, wanted="a run folder, a checkpoints folder or a checkpoint")
        inner = path / CHECKPOINTS
        return Shelf(inner if inner.is_dir() else path)
    except (OSError, ValueError) as error:
        raise _none(path, wanted="a folder that can be read", found=str(error)) from error


def _is_checkpoint(path: Path) -> bool:
    """Whether `path` means one checkpoint, whole or not: by its name or by what is in it."""
    try:
        return path.exists() and (step_of(path.name) is not None or (path / MANIFEST).exists())
    except (OSError, ValueError):
        return False


def _plain(path: Path) -> Path:
    """The same checkpoint by a name that says its step, if there is one: not `.`, no link."""
    return path if step_of(path.name) is not None else path.resolve()


def _none(path: Path, *, wanted: str, found: str = "") -> RequestError:
    found = found or ("nothing that is one" if path.exists() else "no such file or folder")
    return RequestError(
        "checkpoint.none",
        what="there is no checkpoint here",
        found=found,
        wanted=wanted,
        where=str(path),
        next_step=_command("list", path) if path.is_dir() else "name a run folder",
    )


def _command(verb: str, path: Path) -> str:
    return shlex.join(("pith", "checkpoint", verb, str(path)))


def _step(path: Path) -> int:
    return step_of(path.name) or 0


def _reasons(found: Found) -> str:
    return "; ".join(str(fault) for fault in found.faults)


def _summary(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "path": str(found.path),
        "step": found.step,
        "bytes": sum(_sizes(found.path)),
        "saved_at": _saved_at(found.path),
        "complete": found.complete,
        "faults": [str(fault) for fault in found.faults],
        "layout": manifest.layout if manifest else None,
        "last_loss": manifest.position.last_loss if manifest else None,
    }


def _sizes(path: Path) -> Iterator[int]:
    """Bytes of what is there now, links not followed."""
    for item in (path, *path.rglob("*")):
        try:
            if item.is_file() and not item.is_symlink():
                yield item.stat().st_size
        except OSError:  # gone since, or not ours to see
            continue


def _saved_at(path: Path) -> str | None:
    try:
        written = (path / MANIFEST).stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")


def _line(summary: dict[str, Any]) -> str:
    """One checkpoint, or one leftover with its reasons."""
    path = Path(summary["path"])
    step = path.name if summary["step"] is None else f"step {summary['step']}"
    head = f"{step:<24} {summary['bytes']:>15,} bytes"
    if not summary["complete"]:
        return f"{head}  not complete: {'; '.join(summary['faults'])}"
    return (
        f"{head}  complete  saved {summary['saved_at']}  {_layout(summary['layout'])}"
        f"  loss {_loss(summary['last_loss'])}"
    )


def _layout(layout: dict[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in layout.items())


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"


def _all_faults(found: Found) -> list[Fault]:
    """The faults of one checkpoint read whole, not only those that its sizes show."""
    if found.manifest is None:
        return list(found.faults)
    deep = faults(found.path, found.manifest, checksums=True, strangers=True)
    return [*found.faults, *(fault for fault in deep if fault not in found.faults)]


def _check(found: Found, wrong: Sequence[Fault]) -> Check:
    told = "; ".join(map(str, wrong))
    if not told and (manifest := found.manifest):
        told = f"{len(manifest.files)} files, {manifest.size_bytes:,} bytes, as written"
    return Check(found.path.name, not wrong, told, "every file as written", str(found.path))


def _plain_fault(fault: Fault) -> dict[str, str]:
    return {"where": fault.where, "found": fault.found, "wanted": fault.wanted}


def _kinds(tensors: dict[str, TensorEntry]) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes of the model and of each moment of the optimizer."""
    sums: dict[str, Counter[str]] = {}
    for name, entry in tensors.items():
        kind = ".".join(name.split(".")[: 2 if name.startswith("optimizer.") else 1])
        counted = {"tensors": 1, "elements": entry.num_elements, "bytes": entry.size_bytes}
        sums.setdefault(kind, Counter()).update(counted)
    return {kind: dict(counts) for kind, counts in sums.items()}


def _words(found: Found, manifest: Manifest, kinds: dict[str, dict[str, int]]) -> Iterator[str]:
    at = manifest.position
    yield str(found.path)
    yield "complete" if found.complete else f"NOT COMPLETE: {_reasons(found)}"
    yield f"step {at.step}: {at.samples:,} samples, {at.updates:,} updates, {at.skips} skipped last"
    yield f"loss {_loss(at.first_loss)} at first, {_loss(at.last_loss)} at last"
    yield f"recipe {manifest.recipe.get('name', 'without a name')}, run {manifest.run}"
    yield f"saved on {_layout(manifest.layout)}"
    yield "versions " + ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
    yield f"corpus {manifest.corpus[:16]}, tokenizer {manifest.tokenizer[:16]}"
    yield f"{len(manifest.tensors):,} tensors in {len(manifest.files)} files"
    for kind, sums in kinds.items():
        yield (
            f"  {kind:<22} {sums['tensors']:>7,} tensors {sums['elements']:>17,} elements"
            f" {sums['bytes']:>17,} bytes"
        )


def _rows(tensors: dict[str, TensorEntry]) -> Sequence[str]:
    width = max(map(len, tensors), default=0)
    return [f"{n:<{width}}  {t.dtype}  {list(t.shape)}" for n, t in sorted(tensors.items())]
