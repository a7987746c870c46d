"""Final weights: what differs is named, and what cannot be read is no pass."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pith.checkpoint.manifest import MANIFEST, TensorEntry, decode, describe, encode
from pith.checkpoint.pieces import Piece
from pith.checkpoint.store import read_whole, write
from pith.report import Check
from pith.verify.compare import Comparison, compare
from pith.verify.record import read_run
from pith.verify.weights import apart

CHECKPOINT = Path("checkpoints") / "step-00000006"
EXPERTS = "model.layers.1.mlp.experts.down_proj.weight"
NORM = "model.norm.weight"
Change = Callable[[dict[str, Tensor]], object]


def rewrite(run: Path, change: Change) -> None:
    """Save the last checkpoint of a run anew with tensors as `change` leaves them."""
    folder = run / CHECKPOINT
    manifest, tensors = decode((folder / MANIFEST).read_bytes()), read_whole(folder)
    change(tensors)
    for path in folder.iterdir():
        path.unlink()
    pieces = {name: Piece(rows, 0, tuple(rows.shape)) for name, rows in tensors.items()}
    write(pieces, folder, group=None)
    entries = {
        name: TensorEntry(shape=tuple(rows.shape), dtype=str(rows.dtype).removeprefix("torch."))
        for name, rows in tensors.items()
    }
    files = tuple(describe(path) for path in sorted(folder.iterdir()))
    changed = manifest.model_copy(update={"tensors": entries, "files": files})
    (folder / MANIFEST).write_bytes(encode(changed))


def compared(a: Path, b: Path, *, reordered: bool = False) -> tuple[Comparison, dict[str, Check]]:
    found = compare(read_run(a, label="A"), read_run(b, label="B"), reordered=reordered)
    return found, {check.name: check for check in found.checks if not check.ok}


def test_tensors_saved_anew_are_equal(plain: Path, twin: Path) -> None:
    rewrite(twin, lambda tensors: None)

    assert compared(plain, twin)[1] == {}


@pytest.mark.parametrize("name", [EXPERTS, "optimizer.exp_avg.layers.0.mlp.gate.weight"])
def test_the_last_bit_of_one_weight_or_moment_is_a_difference_on_a_cpu(
    plain: Path, twin: Path, name: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        flat = tensors[name].view(-1)
        flat[7] = torch.nextafter(flat[7], torch.tensor(9.0))

    rewrite(twin, change)
    found, failed = compared(plain, twin)

    assert list(failed) == ["weights"]
    assert f"1 of 81 tensors differ: at most {found.weights.relative[name]:.1e}, {name}" in (
        failed["weights"].found
    )
    assert compared(plain, twin, reordered=True)[1] == {}


def test_the_worst_tensor_and_the_first_in_model_order_are_named(plain: Path, twin: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[NORM].mul_(1.0 + 1e-3)
        tensors[EXPERTS].mul_(1.0 + 1e-2)

    rewrite(twin, change)
    found, failed = compared(plain, twin, reordered=True)

    assert list(failed) == ["weights"]
    assert found.data["weights"]["worst"] == EXPERTS
    assert found.data["weights"]["first"] == EXPERTS
    assert found.data["weights"]["max_relative"] == pytest.approx(1e-2 / 1.01, rel=1e-3)
    assert found.weights.relative[NORM] == pytest.approx(1e-3 / 1.001, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t[NORM].fill_(math.nan), f"{NORM}: not finite in B"),
        (lambda t: t[EXPERTS][2, 0].fill_(-math.inf), f"{EXPERTS}: not finite in B"),
        (lambda t: t.pop(EXPERTS), f"{EXPERTS}: [4, 32, 16] against missing"),
        (lambda t: t.update({"model.x": torch.ones(2)}), "model.x: missing against [2]"),
        (lambda t: t.update({NORM: torch.ones(31)}), f"{NORM}: [32] against [31]"),
        (lambda t: t.update({NORM: torch.ones(32, 1)}), f"{NORM}: [32] against [32, 1]"),
    ],
)
@pytest.mark.parametrize("reordered", [False, True])
def test_tensors_that_do_not_belong_together_fail(
    plain: Path, twin: Path, change: Change, told: str, reordered: bool
) -> None:
    rewrite(twin, change)

    assert told in compared(plain, twin, reordered=reordered)[1]["tensors"].found


@pytest.mark.parametrize(
    "change",
    [lambda tensors: tensors.pop(NORM), lambda tensors: tensors[NORM].fill_(math.nan)],
)
def test_what_both_runs_lack_is_no_pass(twin: Path, change: Change) -> None:
    rewrite(twin, change)

    assert f"{NORM}: " in compared(twin, twin)[1]["tensors"].found


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", MANIFEST])
@pytest.mark.parametrize("spoil", ["gone", "cut short", "a byte"])
def test_a_damaged_checkpoint_fails(plain: Path, twin: Path, name: str, spoil: str) -> None:
    path = twin / CHECKPOINT / name
    content = bytearray(path.read_bytes())
    path.unlink()
    content[len(content) // 2] ^= 1
    if spoil != "gone":
        path.write_bytes(content if spoil == "a byte" else content[:-1])

    found, failed = compared(plain, twin)

    assert not failed["weights"].ok
    assert str(CHECKPOINT) in failed["weights"].found
    assert found.weights.relative == {}


def test_a_norm_is_relative_to_the_larger_of_two() -> None:
    ones = torch.ones(4)

    assert apart(ones, ones.clone()) == 0
    assert apart(ones, ones * 4) == apart(ones * 4, ones) == 0.75
    assert apart(ones * 0, ones) == 1
    assert apart(torch.tensor([0.0]), torch.tensor([-0.0])) > 0
    assert apart(ones, ones.double()) > 0, "another type has other bits"
    assert apart(ones, ones * math.nan) == math.inf
    assert apart(torch.full((2,), math.nan), torch.full((2,), math.inf)) == math.inf
