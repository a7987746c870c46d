from pathlib import Path

import pytest

from pith.verify.repository.checkout import Checkout


@pytest.fixture
def repository() -> Checkout:
    """The checkout that these tests are part of."""
    return Checkout(Path(__file__).parents[2])
