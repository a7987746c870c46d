"""Shares are joined into whole tensors, and what is torn or differs is named."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pith.errors import RunFailedError
from pith.verify.share import Share, gap, gaps, joined

WHOLE = torch.arange(6.0).view(3, 2)


def held(rows: slice, *, counted: bool = True, tensor: Tensor = WHOLE) -> Share:
    return Share({"w": tensor[rows]}, {"w": rows.start}, frozenset({"w"} if counted else ()))


def test_rows_in_any_order_and_equal_copies_are_one_tensor() -> None:
    shares = [held(slice(2, 3)), held(slice(0, 2)), held(slice(0, 2), counted=False)]
    assert torch.equal(joined([*shares, held(slice(3, 3))])["w"], WHOLE)
    nan = torch.full((3, 2), torch.nan)
    both = [held(slice(0, 3), tensor=nan), held(slice(0, 3), counted=False, tensor=nan)]
    assert joined(both)["w"].isnan().all()


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ([held(slice(0, 2)), held(slice(0, 2))], "row 0 counted twice"),
        ([held(slice(0, 1)), held(slice(2, 3))], "rows 0 to 0, 2 to 2"),
        ([held(slice(1, 3))], "rows 1 to 2"),
        ([held(slice(0, 2)), held(slice(1, 3))], "rows 0 to 1, 1 to 2"),
        ([held(slice(0, 3)), held(slice(1, 2), counted=False, tensor=WHOLE + 1)], "on rank 1"),
        ([held(slice(0, 3), counted=False)], "on rank 0"),
    ],
)
def test_rows_that_are_missing_doubled_or_unlike_are_refused(
    shares: list[Share], found: str
) -> None:
    with pytest.raises(RunFailedError, match=found):
        joined(shares)


@pytest.mark.parametrize(
    ("found", "wanted", "text"),
    [
        (2 * WHOLE, WHOLE, "w: 2 times what one process finds, which is ep"),
        (WHOLE / 2, WHOLE, "w: 0.5 times what one process finds, which is 1 / ep"),
        (-WHOLE, WHOLE, "w: -1 times what one process finds"),
        (WHOLE + 1, WHOLE, "w: relative 3.3e-01"),
        (0 * WHOLE, WHOLE, "w: zero"),
        (WHOLE, 0 * WHOLE, "w: not zero, as in one process"),
        (WHOLE * torch.nan, WHOLE, "w: not finite"),
        (WHOLE[:2], WHOLE, r"w: shape (2, 2) instead of (3, 2)"),
        (None, WHOLE, "w: missing"),
    ],
)
def test_a_gap_tells_a_clean_factor_and_where_it_may_come_from(
    found: Tensor | None, wanted: Tensor, text: str
) -> None:
    sizes: Mapping[str, int] = {"ep": 2, "dp": 1, "pp": 3}
    told = gap("w", found, wanted)
    assert told.relative > 0.3
    assert told.text(sizes) == text


def test_equal_tensors_have_no_gap_and_unknown_ones_have() -> None:
    found = gaps({"w": WHOLE, "x": WHOLE}, {"w": WHOLE})
    assert [(each.name, each.relative) for each in found] == [("w", 0.0), ("x", torch.inf)]
    assert gap("w", 0 * WHOLE, 0 * WHOLE).relative == 0
