"""The config.json that a family is made from, as it was given."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pith.disk import require_regular
from pith.errors import RequestError

MOST_BYTES = 1 << 20
MOST_LEVELS = 16
POINTER = b"version https://git-lfs.github.com/spec/"
MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
WANTED = "the config.json of a Hugging Face model"


@dataclass(frozen=True, slots=True)
class Given:
    """The fields of a config, and the file's own bytes."""

    fields: Mapping[str, Any]
    content: bytes

    @property
    def model_type(self) -> str:
        """The name that transformers has for the family."""
        return str(self.fields["model_type"])


def read(path: Path) -> Given:
    """The config at `path`. Raises RequestError for anything but a small JSON object that names
    its model_type."""
    try:
        if path.is_dir():
            raise _refused(path, "a folder", next_step=f"--config {path / 'config.json'}")
        require_regular(path)
        if (size := path.stat().st_size) > MOST_BYTES:
            raise _refused(path, f"{size:,} bytes", wanted=f"{WANTED}, at most {MOST_BYTES:,}")
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        cause = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise _refused(path, cause) from error
    return Given(_parse(path, content), content)


def parse(content: bytes) -> Any:
    """The JSON value in a file. Raises ValueError or RecursionError where there is none."""
    return json.loads(content.decode(), parse_constant=_refuse_constant)


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    if content.startswith(POINTER):
        raise _refused(path, "a Git LFS pointer", next_step="git lfs pull, or download the file")
    try:
        fields = parse(content)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _refused(path, f"JSON, but no object: {str(fields)[:40]}")
    if _is_deeper(fields, MOST_LEVELS):
        raise _refused(path, f"values nested more than {MOST_LEVELS} deep")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not MODEL_TYPE.fullmatch(model_type):
        wanted = f"{WANTED}: letters, digits, . _ - under that key"
        raise _refused(path, f"model_type {str(model_type)[:40]!r}", wanted=wanted)
    return fields


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects in `value` are nested in more than so many levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refused(
    path: Path, found: str, *, wanted: str = WANTED, next_step: str = "name another file"
) -> RequestError:
    return RequestError(
        "scaffold.config",
        what="no family can be made from that",
        found=found,
        wanted=wanted,
        where=f"--config {path}",
        next_step=next_step,
    )
