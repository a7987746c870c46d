"""The choice of operators is explicit, printable, and refuses names that do not exist."""

import subprocess
import sys

import pytest

from pith.errors import RequestError
from pith.ops import Sizes, choose, implementations, operator_names


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, pith.ops; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_implementation_of_every_operator_can_be_chosen_and_is_named() -> None:
    for operator in operator_names():
        for implementation in implementations(operator):
            chosen = choose("cpu", {operator: implementation})
            assert chosen.names()[operator] == implementation
            assert callable(getattr(chosen, operator))


def test_cuda_takes_library_kernels_and_cpu_the_loop_over_experts() -> None:
    assert choose("cuda").names()["grouped_linear"] == "library"
    assert choose("cuda", {"grouped_linear": "reference"}).names()["grouped_linear"] == "reference"
    assert choose("cpu").names()["grouped_linear"] == "reference"


def test_a_library_kernel_is_no_default_for_sizes_that_it_does_not_take() -> None:
    for sizes, taken in ((Sizes(2, (64, 8)), True), (Sizes(2, (64, 4)), False), (Sizes(8), False)):
        names = choose("cuda", {}, sizes).names()
        assert names["grouped_linear"] == ("library" if taken else "reference")
        assert names["linear"] == "library"


def test_all_unknown_names_are_refused_at_once_with_the_valid_ones() -> None:
    with pytest.raises(RequestError) as caught:
        choose("cpu", {"attention": "flash", "conv": "reference", "rope": "reference"})
    text = str(caught.value)
    assert len(caught.value.faults) == 2
    assert "operators.attention: found 'flash'" in text
    assert "reference, library" in text
    assert "'conv'" in text
    assert "grouped_linear" in text
