"""Files that are whole or not there, whatever happens meanwhile."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sha256_of(path: Path) -> str:
    """The checksum of a file, read back from disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_regular(path: Path) -> None:
    """Raise OSError for what is there and no regular file: reading a FIFO may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file")


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path`, whole and durable, when the block ends well.

    An exception leaves `path` as it was, and so does a kill.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file that is complete or as it was before."""
    with replacing(path) as file:
        file.write(content)


def is_disk_trouble(error: OSError) -> bool:
    """Whether the disk failed, so that the same request may work later; else the path is wrong."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
