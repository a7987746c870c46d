"""A copy of the checkout that families can be added to."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and what makes it a checkout; with mypy's cache, which saves half a minute."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("pith", "tests/models", "examples", ".mypy_cache"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, root / name, symlinks=True)
    for name in ("AGENTS.md", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    return root


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """As little of a checkout as a family is written into."""
    root = tmp_path / "checkout"
    for name in ("pith/arch", "pith/models"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pith/train/build.py", "AGENTS.md", "pyproject.toml"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    (root / "tests" / "models").mkdir(parents=True)
    return root
