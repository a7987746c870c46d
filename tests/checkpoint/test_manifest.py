"""A checkpoint keeps its word or every broken part of it is named (R7, R8, R9, R33)."""

import hashlib
import json
import os
import random
import re
import shutil
import time

import pytest

from pith.checkpoint import manifest as module
from pith.checkpoint.manifest import (
    MANIFEST,
    TensorEntry,
    decode,
    encode,
    faults,
    read,
)
from pith.errors import RequestError
from tests.checkpoint.by_hand import save

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp")


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "shelf ü", 4)


def verify(folder):
    """What `verify` finds: the faults of the files, or the refusal of the manifest."""
    try:
        manifest = read(folder)
    except RequestError as error:
        return [error.where]
    return [fault.where for fault in faults(folder, manifest, checksums=True, strangers=True)]


def sealed(text: str) -> bytes:
    """Any JSON object under a seal that holds, made without the code under test."""
    body = text.rstrip("\n}").encode() + b",\n"
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def plain(folder) -> dict:
    """What manifest.json says, read as any other program reads it."""
    told = json.loads((folder / MANIFEST).read_text())
    del told["sha256"]
    return told


def test_a_manifest_loads_back_equal_and_is_plain_json(folder):
    manifest = read(folder)
    assert manifest == decode(encode(manifest))
    told = plain(folder)
    assert told["position"] == {
        "step": 4, "samples": 32, "updates": 4, "skips": 0, "first_loss": 5.5, "last_loss": 2.5,
    }  # fmt: skip
    assert told["recipe"] == {"name": "tiny", "training": {"steps": 70, "lr": 3e-4, "note": None}}
    assert [file["name"] for file in told["files"]] == list(FILES)
    assert verify(folder) == []


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("size", ["0", "1", "half", "size - 1"])
def test_a_truncated_file_is_refused_by_name_and_size(folder, name, size):
    path = folder / name
    whole = path.stat().st_size
    left = {"0": 0, "1": 1, "half": whole // 2, "size - 1": whole - 1}[size]
    os.truncate(path, left)
    if name == MANIFEST:
        with pytest.raises(RequestError, match="cut short") as caught:
            read(folder)
        assert caught.value.where == str(path)
        return
    (fault,) = faults(folder, read(folder), checksums=False)
    assert (fault.where, fault.found, fault.wanted) == (
        str(path), f"{left} bytes", f"{whole} bytes",
    )  # fmt: skip


def test_a_flipped_byte_anywhere_is_found_in_its_file(folder):
    offsets = random.Random(8)
    names = [*FILES, MANIFEST]
    places = [(n, k) for n in names for k in range((folder / n).stat().st_size)]
    for name, offset in offsets.sample(places, 200):
        path = folder / name
        whole = path.read_bytes()
        flip = offsets.randrange(1, 256)
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ flip]) + whole[offset + 1 :])
        assert verify(folder) == [str(path)], (name, offset, flip)
        path.write_bytes(whole)
    assert verify(folder) == []


def test_no_single_byte_of_the_manifest_can_change_unseen(folder):
    whole = (folder / MANIFEST).read_bytes()
    for offset in range(len(whole)):
        # A bit, white space for white space, and a byte more: what JSON alone would forgive.
        for other in (bytes([whole[offset] ^ 1]), b" ", whole[offset : offset + 1] + b" "):
            changed = whole[:offset] + other + whole[offset + 1 :]
            if changed != whole:
                with pytest.raises(ValueError, match="sha256"):
                    decode(changed)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_deleted_file_is_refused_by_name(folder, name):
    (folder / name).unlink()
    assert verify(folder) == [str(folder / name)]


def test_a_file_of_another_checkpoint_and_an_extra_one_are_found(folder, tmp_path):
    other = save(tmp_path / "other", 5)
    shutil.copy(other / "__0_0.distcp", folder / "__0_0.distcp")
    assert faults(folder, read(folder), checksums=False) == []
    (fault,) = faults(folder, read(folder), checksums=True)
    assert fault.where == str(folder / "__0_0.distcp")
    assert re.fullmatch("sha256 [0-9a-f]{16}", fault.found)
    (folder / "extra file").touch()
    assert verify(folder) == [str(folder / "__0_0.distcp"), str(folder / "extra file")]


def test_only_the_named_files_are_looked_at(folder):
    for name in FILES:
        (folder / name).write_bytes(b"x")
    manifest = read(folder)
    assert len(faults(folder, manifest, checksums=True)) == 3
    (fault,) = faults(folder, manifest, checksums=True, names={".metadata"})
    assert fault.where == str(folder / ".metadata")


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0", "a\n", "-x", "x" * 256]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(folder, name):
    told = plain(folder)
    told["files"][0]["name"] = name
    (folder / MANIFEST).write_bytes(sealed(json.dumps(told)))
    with pytest.raises(RequestError, match=r"files\.0\.name") as caught:
        read(folder)
    assert repr(name)[:40] in str(caught.value)


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(folder, tmp_path):
    path, outside = folder / "__0_0.distcp", tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    (fault,) = faults(folder, read(folder), checksums=True)
    assert fault.found == f"a link to {outside}"
    path.unlink()
    path.symlink_to(path.name)  # to itself
    assert verify(folder) == [str(path)]
    path.unlink()
    outside.rename(folder / "elsewhere")
    path.symlink_to("elsewhere")
    assert faults(folder, read(folder), checksums=True) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"last_loss": 2.5', '"last_loss": NaN', "last_loss"),
        ('"last_loss": 2.5', '"last_loss": 1e999', "last_loss"),
        ('"lr": 0.0003', '"lr": NaN', "Out of range float"),
        ('"lr": 0.0003', '"lr": -Infinity', "Out of range float"),
        ('"lr": 0.0003', '"lr": 1e999', "Out of range float"),
        ('"step": 4', '"step": -4', "position.step"),
        ('"step": 4', '"step": "4"', "position.step"),
        ('"step": 4', '"step": 4, "more": 1', "position.more"),
        ('"pp": 2', '"pp": 0', "layout.pp"),
        ('"float32"', '"object"', "dtype"),
        ("pith/checkpoint/1", "pith/checkpoint/2", "format"),
        ('"note": null', '"note": ' + "[" * 5000 + "]" * 5000, "recursion"),
        ('"__1_0.distcp"', '"__0_0.distcp"', "twice"),
        ('"__1_0.distcp"', '"manifest.json"', "itself"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused_in_one_line(folder, old, new, words):
    text = json.dumps(plain(folder))
    assert old in text
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        decode(sealed(text.replace(old, new, 1)))
    assert len(str(caught.value).splitlines()) == 1
    decode(sealed(text))


def test_a_manifest_without_files_is_refused(folder):
    empty = read(folder).model_copy(update={"files": ()})
    with pytest.raises(ValueError, match="files"):
        decode(encode(empty))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1]", b"null", b"x" * 1000])
def test_what_is_no_manifest_is_refused(content):
    with pytest.raises(ValueError, match="sha256"):
        decode(content)


def test_what_the_file_system_refuses_is_one_error_with_the_path(folder, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "odd" / MANIFEST).mkdir(parents=True)
    for path, words in (
        (tmp_path / "none", "no such folder"),
        (tmp_path, "no manifest.json"),
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "odd", "Is a directory"),
        (tmp_path / "a\0b", "null"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            read(path)
        assert caught.value.where == str(path / MANIFEST)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(RequestError, match="No such file"):
        faults(tmp_path / "none", read(folder), checksums=False, strangers=True)


def test_a_file_that_cannot_be_read_is_a_fault_beside_the_others(folder, monkeypatch):
    real = module.sha256_of

    def refuse(path):
        if path.name == "__0_0.distcp":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(module, "sha256_of", refuse)
    (folder / ".metadata").unlink()
    found = {fault.where: fault.found for fault in faults(folder, read(folder), checksums=True)}
    assert found == {
        str(folder / ".metadata"): "no such file",
        str(folder / "__0_0.distcp"): "Permission denied",
    }


def test_bytes_of_a_tensor_follow_from_shape_and_type():
    sizes = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "float8_e4m3fn": 1}
    for dtype, width in sizes.items():
        assert TensorEntry(shape=(3, 5), dtype=dtype).size_bytes == 15 * width
    assert TensorEntry(shape=(), dtype="float32").size_bytes == 4
    assert TensorEntry(shape=(0, 5), dtype="float32").size_bytes == 0


def test_twenty_thousand_tensors_are_read_within_a_second_of_work(folder):
    names = (f"model.layers.{number}.w" for number in range(20_000))
    tensors = {name: TensorEntry(shape=(64, 9), dtype="float32") for name in names}
    content = encode(read(folder).model_copy(update={"tensors": tensors}))

    def seconds() -> float:
        start = time.process_time()
        assert decode(content).tensors == tensors
        return time.process_time() - start

    assert any(seconds() < 1.0 for _ in range(5))  # others may have the core for a while
