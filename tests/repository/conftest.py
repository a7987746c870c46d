from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Repository:
    """The checkout as its tests read it."""

    root: Path

    @property
    def package(self) -> Path:
        return self.root / "pith"

    def sources(self) -> list[Path]:
        """Every Python file that is part of the project."""
        folders = ("pith", "tests", "tools", "examples")
        return sorted(path for name in folders for path in (self.root / name).rglob("*.py"))

    def pages(self) -> list[Path]:
        """Every page for people and agents."""
        return [
            *(self.root / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md")),
            *sorted((self.root / "docs").rglob("*.md")),
            *sorted((self.root / "skills").rglob("*.md")),
        ]


@pytest.fixture
def repository() -> Repository:
    return Repository(Path(__file__).parents[2])
