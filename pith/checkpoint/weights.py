"""A plain copy of the weights: safetensors files by canonical name, whole or not there at all.

Every process writes the tensors that it owns under a temporary folder (`save_part`); after a
barrier one process describes all files in weights.json and renames the folder (`commit`). A folder
without weights.json is no copy. `save_weights` does both for a process that owns everything.

weights.json: `schema`, `metadata`, `tensors` {canonical name: file, shape, dtype} and
`files` {name: size_bytes, sha256}.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pith.data.shards import is_disk_trouble, sha256_of, sync
from pith.errors import Fault, PithError, RequestError, RunFailedError

SCHEMA = "pith/weights/1"
MANIFEST = "weights.json"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


def save_weights(
    named: Mapping[str, Tensor],
    folder: Path,
    *,
    metadata: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Save the whole model, CPU tensors by canonical name, as `folder`.

    Raises RequestError when `folder` exists, RunFailedError for a non-finite tensor (the first one
    is named, nothing is left behind) and for a disk that cannot take the files.
    """
    temporary = begin(folder)
    try:
        save_part(named, temporary, part=0, max_shard_bytes=max_shard_bytes)
        commit(temporary, folder, num_parts=1, metadata=metadata)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def begin(folder: Path) -> Path:
    """Make the empty temporary folder in which the parts of `folder` are collected.

    What an interrupted save left there is removed. Raises RequestError when `folder` exists or
    cannot be made, RunFailedError when the disk fails.
    """
    _refuse_existing(folder)
    temporary = temporary_folder(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        if is_disk_trouble(error):
            raise _unwritable(temporary, error) from error
        raise RequestError(
            "checkpoint.folder",
            what="no folder can be made here",
            found=error.strerror or str(error),
            wanted="a folder that can be written",
            where=str(folder),
            next_step="name another folder",
        ) from error
    return temporary


def temporary_folder(folder: Path) -> Path:
    """Where the parts of `folder` are collected before it is committed."""
    return folder.with_name(folder.name + ".tmp")


def save_part(
    named: Mapping[str, Tensor],
    temporary: Path,
    *,
    part: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Save the tensors that this process owns, none of them owned by another, as part `part`.

    Tensors are on the CPU. Raises RunFailedError as `save_weights` does.
    """
    for name, tensor in named.items():
        if not bool(torch.isfinite(tensor).all()):
            raise _non_finite(name, tensor)
    tensors: dict[str, dict[str, object]] = {}
    files: dict[str, dict[str, object]] = {}
    for number, shard in enumerate(_shards(named, max_shard_bytes)):
        path = temporary / f"part-{part:05d}-{number:05d}.safetensors"
        try:
            save_file(
                {n: t.contiguous() for n, t in shard.items()}, path, metadata={"format": "pt"}
            )
            sync(path)
            files[path.name] = {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from error
        for name, tensor in shard.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = {"file": path.name, "shape": list(tensor.shape), "dtype": dtype}
    _write_json(temporary / _part_name(part), {"tensors": tensors, "files": files})


def commit(temporary: Path, folder: Path, *, num_parts: int, metadata: Mapping[str, str]) -> None:
    """Make the parts in `temporary` visible as `folder`; one process calls it, after a barrier.

    Raises RunFailedError when a part is missing or two parts hold the same tensor, RequestError
    when `folder` exists.
    """
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for part in range(num_parts):
        path = temporary / _part_name(part)
        if not path.is_file():
            raise _incomplete(temporary, f"no part {part} of {num_parts}")
        described = json.loads(path.read_text())
        twice = sorted(tensors.keys() & described["tensors"].keys())
        if twice:
            raise _incomplete(temporary, f"{twice[0]} in two parts")
        tensors |= described["tensors"]
        files |= described["files"]
    try:
        _publish(temporary, folder, tensors=tensors, files=files, metadata=metadata)
    except OSError as error:
        raise _unwritable(folder, error) from error


def load_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of `folder`, by canonical name, on the CPU.

    Sizes and checksums are compared first. Raises RequestError that lists every missing, cut short
    or changed file, and every tensor that is not as weights.json says.
    """
    manifest = _read_manifest(folder)
    faults = [
        fault for name, file in manifest["files"].items() for fault in _check(folder, name, file)
    ]
    if faults:
        raise _damaged(folder, faults)
    named: dict[str, Tensor] = {}
    for name in manifest["files"]:
        try:
            named |= load_file(folder / name)
        except SafetensorError as error:
            raise _damaged(
                folder, [Fault(str(folder / name), str(error), "safetensors")]
            ) from error
    wanted = {name: (tuple(t["shape"]), t["dtype"]) for name, t in manifest["tensors"].items()}
    found = {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named.items()
    }
    faults = [
        Fault(name, str(found.get(name, "nothing")), str(wanted.get(name, "nothing")))
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if faults:
        raise _damaged(folder, faults)
    return named


def _shards(named: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Cut into shards of at most `max_bytes`, or of one tensor that is larger."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named.items():
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _publish(
    temporary: Path,
    folder: Path,
    *,
    tensors: dict[str, dict[str, Any]],
    files: dict[str, dict[str, Any]],
    metadata: Mapping[str, str],
) -> None:
    """Give the files their last names, describe them, and rename the folder."""
    total = len(files)
    final = {
        name: f"model-{number:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
        for number, name in enumerate(sorted(files), start=1)
    }
    for name, last_name in final.items():
        (temporary / name).rename(temporary / last_name)
    tensors = {name: t | {"file": final[t["file"]]} for name, t in sorted(tensors.items())}
    if total > 1:
        size = sum(file["size_bytes"] for file in files.values())
        weight_map = {name: tensor["file"] for name, tensor in tensors.items()}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(temporary / INDEX, index)
    manifest = {
        "schema": SCHEMA,
        "metadata": dict(metadata),
        "tensors": tensors,
        "files": {final[name]: files[name] for name in sorted(files)},
    }
    _write_json(temporary / MANIFEST, manifest)
    for path in temporary.glob("part-*.json"):
        path.unlink()
    sync(temporary)
    _refuse_existing(folder)
    temporary.rename(folder)
    sync(folder.parent)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        if manifest["schema"] != SCHEMA or not manifest["files"].keys():
            raise ValueError(f"schema {manifest['schema']!r}")
        for tensor in manifest["tensors"].values():
            _ = tuple(tensor["shape"]), tensor["dtype"]
        for file in manifest["files"].values():
            _ = file["size_bytes"], file["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            "checkpoint.no_weights",
            what="this folder holds no complete copy of weights",
            found=f"{type(error).__name__}: {error}",
            wanted=f"{MANIFEST} of schema {SCHEMA}",
            where=str(path),
        ) from error
    return manifest


def _check(folder: Path, name: str, file: Mapping[str, Any]) -> Iterator[Fault]:
    """What is wrong with one file; a name that leads out of `folder` is never opened."""
    path = folder / name
    if Path(name).name != name:
        yield Fault(MANIFEST, f"file {name!r}", "a plain file name")
    elif not path.is_file():
        yield Fault(str(path), "no such file", f"{file['size_bytes']} bytes")
    elif path.stat().st_size != file["size_bytes"]:
        yield Fault(str(path), f"{path.stat().st_size} bytes", f"{file['size_bytes']} bytes")
    elif (found := sha256_of(path)) != file["sha256"]:
        yield Fault(str(path), f"sha256 {found}", str(file["sha256"]))


def _part_name(part: int) -> str:
    return f"part-{part:05d}.json"


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
        sync(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise RequestError(
            "checkpoint.exists",
            what="weights are never saved over something",
            found="an existing file or folder",
            wanted="a name that is free",
            where=str(folder),
            next_step="move it away or name another folder",
        )


def _non_finite(name: str, tensor: Tensor) -> PithError:
    count = int((~torch.isfinite(tensor)).sum())
    return RunFailedError(
        "checkpoint.non_finite",
        what="weights that are not finite are not saved",
        found=f"{count} of {tensor.numel()} elements NaN or infinite",
        wanted="finite values",
        where=name,
    )


def _incomplete(temporary: Path, found: str) -> PithError:
    return RunFailedError(
        "checkpoint.incomplete",
        what="the parts do not make one model; nothing was committed",
        found=found,
        wanted="every part once, every tensor in one part",
        where=str(temporary),
    )


def _unwritable(path: Path, error: Exception) -> PithError:
    return RunFailedError(
        "checkpoint.write_failed",
        what="the weights could not be written; nothing was committed",
        found=str(error),
        wanted="a folder that can be written, with space",
        where=str(path),
    )


def _damaged(folder: Path, faults: list[Fault]) -> PithError:
    return RequestError(
        "checkpoint.damaged",
        what="the files are not what was saved",
        found="; ".join(str(fault) for fault in faults[:3]) + ("; ..." if len(faults) > 3 else ""),
        wanted=f"the files and tensors of {MANIFEST}",
        where=str(folder),
        faults=tuple(faults),
    )
