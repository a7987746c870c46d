"""A copy of the weights is whole and finite, or it is not there."""

import errno
import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pith.checkpoint import weights
from pith.checkpoint.weights import (
    begin,
    commit,
    load_weights,
    save_part,
    save_weights,
    temporary_folder,
)
from pith.errors import RequestError, RunFailedError


@pytest.fixture
def named():
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(3, 8, 5, generator=generator)
    return {
        "embed_tokens.weight": torch.randn(16, 5, generator=generator),
        "layers.0.mlp.experts.gate_proj.weight": fused[:, :4],
        "layers.0.mlp.experts.up_proj.weight": fused[:, 4:],
        "layers.0.norm.weight": torch.ones(5, dtype=torch.bfloat16),
        "layers.0.mlp.router.bias": torch.zeros(0, dtype=torch.float64),
    }


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def edit_manifest(folder, change):
    path = folder / "weights.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_what_was_saved_is_what_is_loaded(tmp_path, named):
    save_weights(named, tmp_path / "a" / "final", metadata={"step": "7"})
    assert_same(load_weights(tmp_path / "a" / "final"), named)
    names = {path.name for path in (tmp_path / "a").rglob("*")}
    assert names == {"final", "model.safetensors", "weights.json"}


def test_the_manifest_says_names_shapes_dtypes_sizes_and_the_metadata(tmp_path, named):
    save_weights(named, tmp_path / "final", metadata={"step": "7"})
    manifest = json.loads((tmp_path / "final" / "weights.json").read_text())
    assert manifest["metadata"] == {"step": "7"}
    assert manifest["tensors"]["layers.0.norm.weight"] == {
        "file": "model.safetensors",
        "shape": [5],
        "dtype": "bfloat16",
    }
    assert manifest["tensors"].keys() == named.keys()
    size = (tmp_path / "final" / "model.safetensors").stat().st_size
    assert manifest["files"]["model.safetensors"]["size_bytes"] == size


def test_shards_hold_what_the_index_says_and_keep_to_their_limit(tmp_path, named):
    folder = tmp_path / "final"
    save_weights(named, folder, metadata={}, max_shard_bytes=330)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == named.keys()
    files = {path.name for path in folder.glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert files == {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    for file in files:
        with safe_open(folder / file, framework="pt") as reader:
            held = set(reader.keys())
        assert held == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(named[name].nbytes for name in held) <= 330
    assert_same(load_weights(folder), named)


def test_parts_of_several_ranks_become_one_copy(tmp_path, named):
    folder = tmp_path / "final"
    temporary = begin(folder)
    items = list(named.items())
    for part in (2, 0, 1):
        save_part(dict(items[part::3]), temporary, part=part, max_shard_bytes=100)
        assert not folder.exists()
    commit(temporary, folder, num_parts=3, metadata={})
    assert_same(load_weights(folder), named)
    assert not temporary.exists()


def test_a_rank_may_own_nothing(tmp_path, named):
    temporary = begin(tmp_path / "final")
    save_part({}, temporary, part=0)
    save_part(named, temporary, part=1)
    commit(temporary, tmp_path / "final", num_parts=2, metadata={})
    assert_same(load_weights(tmp_path / "final"), named)


def test_a_missing_part_is_not_committed(tmp_path, named):
    temporary = begin(tmp_path / "final")
    save_part(named, temporary, part=0)
    with pytest.raises(RunFailedError, match="no part 1 of 2"):
        commit(temporary, tmp_path / "final", num_parts=2, metadata={})
    assert not (tmp_path / "final").exists()


def test_a_tensor_owned_twice_is_not_committed(tmp_path, named):
    temporary = begin(tmp_path / "final")
    save_part(named, temporary, part=0)
    save_part({"layers.0.norm.weight": torch.zeros(5)}, temporary, part=1)
    with pytest.raises(RunFailedError, match=r"layers\.0\.norm\.weight in two parts"):
        commit(temporary, tmp_path / "final", num_parts=2, metadata={})
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_tensor_is_named_and_nothing_is_left_behind(tmp_path, named, value):
    named["layers.0.mlp.experts.up_proj.weight"][2, 3, 4] = value
    with pytest.raises(RunFailedError, match=r"up_proj\.weight.*1 of 60 elements"):
        save_weights(named, tmp_path / "final", metadata={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_saved_over_what_exists(tmp_path, named, kind):
    taken = tmp_path / "final"
    taken.mkdir() if kind == "folder" else taken.write_text("mine")
    with pytest.raises(RequestError, match="existing"):
        save_weights(named, taken, metadata={})
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_folder_that_appears_during_the_save_is_kept(tmp_path, named):
    temporary = begin(tmp_path / "final")
    save_part(named, temporary, part=0)
    (tmp_path / "final").mkdir()
    with pytest.raises(RequestError, match="existing"):
        commit(temporary, tmp_path / "final", num_parts=1, metadata={})
    assert list((tmp_path / "final").iterdir()) == []


def test_leftovers_of_an_interrupted_save_do_not_get_into_the_next(tmp_path, named):
    save_part({"old": torch.ones(3)}, begin(tmp_path / "final"), part=0)
    assert temporary_folder(tmp_path / "final").is_dir()
    save_weights(named, tmp_path / "final", metadata={})
    assert_same(load_weights(tmp_path / "final"), named)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("name", ["file/final", "file/a/b", "A" * 300])
def test_a_folder_that_cannot_be_made_is_a_wrong_request(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="no folder can be made here"):
        begin(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_room_for_a_folder_is_a_failure(tmp_path, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.mkdir", full)
    with pytest.raises(RunFailedError, match="No space left on device"):
        begin(tmp_path / "final")


def test_a_full_disk_names_path_and_cause_and_commits_nothing(tmp_path, named, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(RunFailedError, match=r"part-00000-00000.*No space left on device"):
        save_weights(named, tmp_path / "final", metadata={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", ["nothing", "one", "half", "all but one"])
def test_a_file_cut_short_is_refused_with_both_sizes(tmp_path, named, keep):
    save_weights(named, tmp_path / "final", metadata={})
    path = tmp_path / "final" / "model.safetensors"
    data = path.read_bytes()
    size = {"nothing": 0, "one": 1, "half": len(data) // 2, "all but one": len(data) - 1}[keep]
    path.write_bytes(data[:size])
    with pytest.raises(RequestError, match=rf"model\.safetensors.*{size} bytes.*{len(data)} bytes"):
        load_weights(tmp_path / "final")


def test_every_damaged_file_is_listed(tmp_path, named):
    folder = tmp_path / "final"
    save_weights(named, folder, metadata={}, max_shard_bytes=330)
    first, second, third = sorted(folder.glob("*.safetensors"))
    flipped = bytearray(first.read_bytes())
    flipped[-1] ^= 1
    first.write_bytes(flipped)
    third.unlink()
    with pytest.raises(RequestError, match="not what was saved") as caught:
        load_weights(folder)
    assert [fault.where for fault in caught.value.faults] == [str(first), str(third)]
    assert second.name not in str(caught.value)


def test_tensors_that_differ_from_the_manifest_are_listed(tmp_path, named):
    def change(manifest):
        manifest["tensors"]["extra"] = {"shape": [1], "dtype": "float32"}
        manifest["tensors"]["layers.0.norm.weight"]["shape"] = [6]
        manifest["tensors"]["embed_tokens.weight"]["dtype"] = "float64"

    save_weights(named, tmp_path / "final", metadata={})
    edit_manifest(tmp_path / "final", change)
    with pytest.raises(RequestError) as caught:
        load_weights(tmp_path / "final")
    wheres = [fault.where for fault in caught.value.faults]
    assert wheres == ["embed_tokens.weight", "extra", "layers.0.norm.weight"]


def test_a_file_name_never_leads_out_of_the_folder(tmp_path, named):
    save_weights(named, tmp_path / "final", metadata={})
    save_file({"secret": torch.ones(1)}, tmp_path / "outside.safetensors")

    def change(manifest):
        manifest["files"]["../outside.safetensors"] = manifest["files"]["model.safetensors"]

    edit_manifest(tmp_path / "final", change)
    with pytest.raises(RequestError, match=r"'\.\./outside\.safetensors'.*plain file name"):
        load_weights(tmp_path / "final")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": "pith/weights/1"}',
        '{"schema": "other/1", "files": {"a": {}}, "tensors": {}}',
        '{"schema": "pith/weights/1", "files": {}, "tensors": {}}',
        '{"schema": "pith/weights/1", "files": {"a": 3}, "tensors": {}}',
        '{"schema": "pith/weights/1", "files": {"a": {"size_bytes": 1}}, "tensors": {}}',
        '{"schema": "pith/weights/1", "files": {"a": {}}, "tensors": {"x": {"shape": 3}}}',
        b"\xff\xfe",
    ],
)
def test_a_broken_manifest_is_one_clear_line(tmp_path, text):
    (tmp_path / "weights.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RequestError, match=r"weights\.json.*no complete copy"):
        load_weights(tmp_path)


def test_a_folder_without_manifest_is_no_copy(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="no complete copy of weights"):
        load_weights(tmp_path)
