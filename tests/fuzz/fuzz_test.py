"""The first random cases; ``make fuzz`` tries some 1,000 others."""

import pytest

from tests.fuzz.loops import attempt


@pytest.mark.parametrize("seed", range(20))
def test_random_case(seed):
    failure = attempt(seed, compiles=False)
    assert failure in (None, "unfit"), failure
