"""The repository as its rules read it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pith.errors import UnavailableError

PROJECT, GUIDE = "pyproject.toml", "AGENTS.md"
TOP_PAGES = ("README.md", GUIDE, "CHANGELOG.md")
TOP_LEVEL = ("pith", "tests", "docs", "skills", "tools", "examples")


@dataclass(frozen=True)
class Source:
    """One Python file: where it stands in the repository, and what is in it."""

    path: Path
    root: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def where(self, line: int = 0) -> str:
        """The place of a fault, as PATH:LINE."""
        place = self.path.relative_to(self.root).as_posix()
        return f"{place}:{line}" if line else place


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of the project at `root`."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> "Checkout":
        """The checkout that `folder` lies in. Raises UnavailableError where it lies in none."""
        for root in (folder, *folder.parents):
            if (root / GUIDE).is_file() and (root / PROJECT).is_file() and (root / "pith").is_dir():
                return cls(root)
        raise UnavailableError(
            "check.no_checkout",
            what="the rules of the repository hold for a checkout, not for an installed package",
            found="no checkout of pith",
            wanted=f"a folder with {GUIDE}, {PROJECT} and pith/",
            where=str(folder),
            next_step="run it inside a checkout of pith",
        )

    @property
    def package(self) -> Path:
        return self.root / "pith"

    def read(self, name: str) -> str:
        """The text of a file; nothing where it is missing."""
        path = self.root / name
        return path.read_text() if path.is_file() else ""

    def package_sources(self) -> list[Source]:
        """The Python files of the package."""
        return [Source(path, self.root) for path in sorted(self.package.rglob("*.py"))]

    def pages(self) -> list[Path]:
        """Every page for people and agents that is there."""
        top = (self.root / name for name in TOP_PAGES)
        docs = sorted((self.root / "docs").rglob("*.md"))
        return [page for page in (*top, *docs, *self.skills()) if page.is_file()]

    def skills(self) -> list[Path]:
        """The pages of procedures."""
        return sorted((self.root / "skills").rglob("*.md"))

    def files(self) -> Iterator[Path]:
        """All that people read: sources, pages, and how the project is built."""
        for folder in ("pith", "tests", "tools", "examples"):
            yield from sorted((self.root / folder).rglob("*.py"))
        yield from self.pages()
        yield from (self.root / name for name in ("Makefile", PROJECT, ".ci/run"))
