"""How far apart from transformers a tensor may be, and how that is said."""

from math import inf, nextafter

import pytest
import torch

from pith.verify.model_parity import Gap, Oracle
from pith.verify.transformers_model import Outcome


@pytest.mark.parametrize(
    ("own", "limit"), [(0.0, 1e-5), (2e-6, 1e-5), (1e-5, 4e-5), (1e-2, 1e-4), (inf, 1e-4)]
)
def test_float32_may_be_a_few_times_as_far_off_as_that_of_transformers(
    own: float, limit: float
) -> None:
    exact = torch.ones(8, dtype=torch.float64)
    outcome = Outcome(exact, exact, {}, {}, None)
    for dtype, wanted in ((torch.float32, limit), (torch.float64, 1e-10)):
        oracle = Oracle(dtype, outcome, outcome)
        for times, ok in ((0.99, True), (1.01, False)):
            gap = oracle.gap(exact * (1 + times * wanted), exact, exact * (1 + own))
            assert gap.ok is ok
            assert gap.limit == pytest.approx(wanted)


def test_a_gap_that_fails_never_reads_like_its_limit() -> None:
    assert str(Gap(2e-5, 1e-5)) == "2.0e-05 apart (limit 1.0e-05)"
    assert str(Gap(1.0004e-5, 1e-5)) == "1.0004e-05 apart (limit 1.0000e-05)"
    assert str(Gap(nextafter(1e-5, 1), 1e-5)).count("1.0000000000") == 2
    assert str(Gap(inf, 1e-5)) == "inf apart (limit 1.0e-05)"
