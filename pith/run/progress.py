"""How far a rank is, readable by others even after it was killed."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Position:
    """The last thing a rank began: its step, its slot (or the word for a phase), its process."""

    step: int
    slot: str
    pid: int

    def __str__(self) -> str:
        return f"step {self.step}, slot {self.slot}"


class Progress:
    """The position of one rank in a small mapped file: a write costs no system call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.write(b" " * SIZE_BYTES)  # a hole in the file would fail later, on a full disk
            file.flush()
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        self._pid = os.getpid()

    def set(self, step: int, slot: str) -> None:
        """Note that this rank now begins `slot` of `step`; a long slot text is cut."""
        self._map[:] = f"{self._pid} {step} {slot}".encode()[:SIZE_BYTES].ljust(SIZE_BYTES)

    @staticmethod
    def read(path: Path) -> Position | None:
        """The position last set in the file, or None where a rank never came that far."""
        try:
            pid, step, slot = path.read_text(errors="replace").strip("\0 ").split(maxsplit=2)
            return Position(int(step), slot, int(pid))
        except (FileNotFoundError, ValueError):
            return None
