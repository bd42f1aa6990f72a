"""Random cases from fixed seeds; ``make fuzz`` tries other ones."""

import pytest

from tests.fuzz.loops import attempt

QUICK, MORE = 20, 200
SEEDS = [
    *range(QUICK),
    *(pytest.param(i, marks=pytest.mark.thorough) for i in range(QUICK, MORE)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_case(seed):
    failure = attempt(seed, compiles=False)
    assert failure in (None, "unfit"), failure
