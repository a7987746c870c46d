"""The text form of a table reads back, and nothing else is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pith.schedule.table import Kind, Op, parse_slot, slot_text

OPS = st.builds(Op, st.sampled_from(Kind), st.integers(0, 10**6), st.integers(0, 10**6))


@given(st.lists(OPS, min_size=1, max_size=3).map(tuple))
def test_a_slot_reads_back(slot):
    assert parse_slot(slot_text(slot)) == slot


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F0", "F.0", "F0.", "F.", "X0.1", "f0.1", "F-1.0", "F0.1.2", "F٣.0", "F²0.1"),
        *("F 0.1", f"F{'9' * 5000}.0", "F0.1|", "|", "F0.1 B0.0"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is no operation"):
        parse_slot(text)
