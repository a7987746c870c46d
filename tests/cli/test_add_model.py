"""`pith add-model`: what it says before it writes, and every request that it refuses."""

import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import pith
from pith.cli import add_model, app

ROOT = Path(__file__).parents[2]
FIELDS = json.loads((ROOT / "examples" / "add-olmoe" / "config.json").read_text())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the two shared files, which the command takes for its own."""
    root = tmp_path / "checkout"
    for name in ("pith/arch", "pith/models"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pith" / "train").mkdir()
    shutil.copy2(ROOT / "pith" / "train" / "build.py", root / "pith" / "train")
    monkeypatch.setattr(add_model, "checkout", lambda: root)
    return root


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The config.json of a family that pith does not have."""
    path = tmp_path / "fresh.json"
    path.write_text(json.dumps(FIELDS | {"model_type": "fresh"}))
    return str(path)


def tree(root: Path) -> dict[str, str]:
    return {
        str(path): sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in root.rglob("*")
    }


def refused(root: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    """The one line in which a request is refused; nothing was written."""
    before = tree(root)
    found = app.run(["add-model", *words])
    said = capsys.readouterr()
    assert found == status, said.err
    assert said.out == ""
    assert tree(root) == before
    return said.err


def test_a_dry_run_shows_the_files_and_the_arms_and_writes_nothing(
    root: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(root)
    words = ["add-model", "fresh", "--config", config, "--dry-run", "--json"]
    assert app.run(words) == 0
    assert tree(root) == before
    said = capsys.readouterr()
    data = json.loads(said.out)["data"]
    assert [file["path"] for file in data["files"] if file["state"] == "new"] == [
        "pith/recipes/fresh/config.json",
        "pith/recipes/fresh/recipe.toml",
        "pith/arch/fresh.py",
        "pith/models/fresh.py",
        "pith/verify/configs/fresh/tiny.json",
        "tests/models/test_fresh.py",
    ]
    added = re.findall(r"^\+ .*", data["diff"], flags=re.MULTILINE)
    assert added == [
        '+        case "fresh":',
        "+            arch = Fresh.examine(fields)",
        "+        case Fresh():",
        "+            stage = FreshStage(architecture, layers, **place, **made_of)",
    ]
    assert data["diff"] in said.err + "\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Mixtral-8x7B", "pith add-model mixtral_8x7b "),
        ("8x7b", "pith add-model model_8x7b "),
        ("a__b", "pith add-model a_b "),
        ("../x", "pith add-model x "),
        ("", "pith add-model model "),
        ("ünï", "no such name"),
        ("x" * 33, f"pith add-model {'x' * 32} "),
        ("class", "pith add-model class_model "),
        ("tuple", "a word of Python"),
        ("qwen3", "pith/arch/qwen3.py, which was not made by add-model"),
        ("decoder", "pith/arch/decoder.py"),
        ("stage", "pith/models/stage.py"),
        ("tiny-moe", "the shipped recipe tiny-moe"),
        ("tiny_moe", "as good as the shipped recipe tiny-moe"),
        ("examine", "examine of pith/arch/__init__.py"),
        ("architecture", "Architecture of pith/arch/__init__.py"),
        ("parameter_spec", "ParameterSpec of pith/train/build.py"),
        ("layer_tensors", "LayerTensors, which its own files import"),
        ("true", "a word of Python"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(
    root: Path, config: str, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    said = refused(root, capsys, name, "--config", config)
    assert said.startswith("error: NAME: ")
    assert told in said
    assert said.count("\n") == 1


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def _text(content: str | bytes) -> Callable[[Path], Any]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(raw)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "No such file"),
        (Path.mkdir, "found a folder"),
        (_fifo, "no regular file"),
        (_huge, "1,073,741,824 bytes"),
        (_text(""), "no JSON"),
        (_text('{"model_type": "x",'), "no JSON"),
        (_text('{"model_type": "x", "rope_theta": NaN}'), "NaN is no JSON number"),
        (_text("[" * 100_000), "no JSON"),
        (_text(b'{"model_type": "\xff"}'), "no JSON"),
        (_text("[1, 2]"), "JSON, but no object: [1, 2]"),
        (_text('{"model_type": "x", "a": ' + "[" * 600 + "]" * 600 + "}"), "nested more than 16"),
        (_text('{"hidden_size": 8}'), "model_type 'None'"),
        (_text('{"model_type": 3}'), "model_type '3'"),
        (_text('{"model_type": "a\\"b"}'), "model_type"),
        (_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_one_line(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Any],
    told: str,
) -> None:
    path = tmp_path / "config.json"
    make(path)
    said = refused(root, capsys, "fresh", "--config", str(path))
    assert told in said
    assert said.startswith(f"error: --config {path}: ")
    assert said.count("\n") == 1


def test_a_model_type_that_another_family_serves_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = str(ROOT / "pith" / "recipes" / "tiny-moe" / "config.json")
    said = refused(root, capsys, "fresh", "--config", served)
    assert "the family qwen3 serves model_type 'qwen3_moe' already" in said


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=str)
def test_values_that_no_model_can_have_are_refused_together_and_none_twice(
    *, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    wrong = {"hidden_size": -1, "num_key_value_heads": 7}
    wrong |= {"vocab_size": "many", "num_experts_per_tok": 65, "rope_theta": 0}
    wrong |= {"router_aux_loss_coef": -0.5, "tie_word_embeddings": "no"}
    config = FIELDS | {"model_type": "fresh"} | wrong
    del config["num_hidden_layers"]  # may stand there under another name
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    said = refused(root, capsys, "fresh", "--config", str(path), *words)
    assert f"the config has {len(wrong)} values that no model can have" in said
    told = re.findall(r"^  (\w+): found ", said, flags=re.MULTILINE)
    assert sorted(told) == sorted(wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"hidden_size": 24}, "hidden_size: found 24, wanted 16 attention heads of an even width"),
        ({"hidden_size": 8}, "hidden_size: found 8, wanted 16 attention heads of an even width"),
        ({"head_dim": 7}, "head_dim: found 7, wanted an even number"),
        ({"num_attention_heads": "16"}, "num_attention_heads: found '16', wanted a whole number"),
    ],
    ids=str,
)
def test_a_width_that_heads_cannot_have_is_one_fault(
    *,
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Any],
    told: str,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FIELDS | {"model_type": "fresh"} | wrong))
    said = refused(root, capsys, "fresh", "--config", str(path))
    assert told in said
    assert "a value that no model can have" in said


def test_another_config_under_the_same_name_is_refused_with_both_values(
    root: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = root / "pith" / "recipes" / "fresh" / "config.json"
    kept.parent.mkdir(parents=True)
    shutil.copy2(config, kept)
    other = FIELDS | {"model_type": "fresh", "hidden_size": 1024, "new_key": 1}
    del other["clip_qkv"]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    said = refused(root, capsys, "fresh", "--config", str(path))
    for line in (
        "  hidden_size: found 1024 in --config, wanted 2048 as it was made",
        "  new_key: found 1 in --config, wanted nothing as it was made",
        "  clip_qkv: found nothing in --config, wanted None as it was made",
    ):
        assert line in said.splitlines()
    kept.write_text("{")
    assert "cannot be read" in refused(root, capsys, "fresh", "--config", config)


@pytest.mark.parametrize("like", ["qwen", "fresh", ""])
def test_a_family_to_begin_with_that_is_not_there_is_refused(
    root: Path, config: str, capsys: pytest.CaptureFixture[str], like: str
) -> None:
    said = refused(root, capsys, "fresh", "--config", config, "--like", like)
    assert "--like" in said
    assert "qwen3" in said or like == "fresh"


@pytest.mark.parametrize(
    ("place", "make", "told"),
    [
        ("pith/recipes/fresh/config.json", Path.mkdir, "found no regular file"),
        ("pith/recipes/fresh/recipe.toml", _fifo, "found no regular file"),
        ("tests/models/test_fresh.py", Path.mkdir, "found no regular file"),
        ("pith/train/build.py", _text("def build_stage(:"), "no Python (invalid syntax"),
        ("pith/arch/__init__.py", _text(b"# \xff"), "no Python ('utf-8' codec"),
        ("pith/arch/__init__.py", Path.mkdir, "found no regular file"),
        ("pith/train/build.py", lambda path: None, "found nothing"),
        ("pith/train/build.py", _text("import torch\n"), "no import of pith"),
    ],
)
def test_a_file_of_the_checkout_that_is_none_is_named_in_one_line(
    *,
    root: Path,
    config: str,
    capsys: pytest.CaptureFixture[str],
    place: str,
    make: Callable[[Path], Any],
    told: str,
) -> None:
    path = root / place
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    said = refused(root, capsys, "fresh", "--config", config, status=3)
    assert place in said
    assert told in said
    assert said.count("\n") == 1


def test_an_installed_package_is_left_alone(
    *,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pith, "__file__", str(tmp_path / "site-packages/pith/__init__.py"))
    assert app.run(["add-model", "fresh", "--config", config]) == 3
    said = capsys.readouterr().err
    assert "installed package" in said
    assert "next: git clone" in said


def test_a_report_that_cannot_be_written_is_refused_first(
    root: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "missing" / "report.json")
    assert "--out" in refused(root, capsys, "fresh", "--config", config, "--out", out)
