"""A family is written whole or not at all, and nothing that a developer wrote is lost."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from pith.errors import UnavailableError
from pith.scaffold import changes as changes_module
from pith.scaffold.changes import Change, write
from pith.scaffold.given import Given
from pith.scaffold.plan import plan

FACTS = "pith/arch/fresh.py"
CONFIG = {
    "model_type": "fresh",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
GIVEN = Given(CONFIG, json.dumps(CONFIG).encode())


def planned(root: Path) -> list[Change]:
    return plan("fresh", GIVEN, like=None, root=root)[1]


def tree(root: Path) -> dict[str, str]:
    """Every folder, and the checksum of every file."""
    return {
        str(path): sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in root.rglob("*")
    }


def test_the_second_time_nothing_is_due(bare: Path) -> None:
    write(bare, planned(bare))
    before = tree(bare)
    again = planned(bare)
    assert {change.state for change in again} == {"unchanged"}
    write(bare, again)
    assert tree(bare) == before


@pytest.mark.parametrize("num_files", range(8))
def test_a_state_that_was_left_half_written_is_completed(bare: Path, num_files: int) -> None:
    whole = planned(bare)
    write(bare, whole[:num_files])
    rest = planned(bare)
    assert [change.is_due for change in rest] == [False] * num_files + [True] * (8 - num_files)
    write(bare, rest)
    assert all((bare / change.path).read_bytes() == change.after for change in whole)


def test_a_file_that_was_changed_since_is_kept_and_told(bare: Path) -> None:
    write(bare, planned(bare))
    (bare / FACTS).write_text("changed = True\n")
    again = planned(bare)
    assert [change.path for change in again if change.state == "kept"] == [FACTS]
    write(bare, again)
    assert (bare / FACTS).read_text() == "changed = True\n"


def test_an_arm_that_was_changed_since_is_kept(bare: Path) -> None:
    write(bare, planned(bare))
    arch = bare / "pith" / "arch" / "__init__.py"
    arch.write_text(arch.read_text().replace('case "fresh":', 'case "fresh" | "fresher":'))
    assert {change.state for change in planned(bare)} == {"unchanged"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("num_written", range(8))
def test_where_writing_fails_nothing_is_left(
    bare: Path, monkeypatch: pytest.MonkeyPatch, num_written: int, error: BaseException
) -> None:
    before, changes = tree(bare), planned(bare)
    monkeypatch.setattr(changes_module, "write_durably", _failing(after=num_written, error=error))
    wanted = UnavailableError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as caught:
        write(bare, changes)
    assert tree(bare) == before
    if isinstance(caught.value, UnavailableError):
        assert changes[num_written].path in str(caught.value)
        assert "No space left" in str(caught.value)


def _failing(*, after: int, error: BaseException) -> Callable[[Path, bytes], None]:
    """What writes so many files, then fails once."""
    calls = iter(range(100))

    def write_or_fail(path: Path, content: bytes) -> None:
        if next(calls) == after:
            raise error
        path.write_bytes(content)

    return write_or_fail


def test_a_folder_in_the_place_of_a_file_leaves_nothing(bare: Path) -> None:
    (bare / "pith" / "recipes").write_text("in the way")
    before = tree(bare)
    with pytest.raises(UnavailableError, match="cannot be written"):
        write(bare, planned(bare))
    assert tree(bare) == before


def test_the_config_is_kept_as_it_was_given(bare: Path) -> None:
    write(bare, planned(bare))
    assert (bare / "pith/recipes/fresh/config.json").read_bytes() == GIVEN.content
    tiny = json.loads((bare / "pith/verify/configs/fresh/tiny.json").read_text())
    assert tiny["model_type"] == "fresh"
    assert tiny["hidden_size"] == 32
