"""Strategies of correlated noise beside values of another implementation.

Computed by benchmarks/noise_strategies.py: buffered ones by JAX-Privacy 2.0.0, inverse
banded ones by its source of August 2026 (2.3.0.dev0, commit 8967688).
"""

import pytest

from opacus_ext.strategies import BufferedToeplitz, InverseBanded, Participation

# (bands, steps, separation): prefix sums, last iterate, sensitivity.
INVERSE_BANDED = {
    (2, 50, 10): (3.082207001, 4.203173404, 2.237815290),
    (4, 50, 10): (2.411072469, 3.114919999, 2.342218176),
    (16, 50, 10): (2.104826453, 2.365048598, 2.975610136),
    (2, 500, 100): (9.192388155, 12.948616400, 2.236067977),
    (4, 500, 100): (6.439620979, 8.999983624, 2.236067978),
    (16, 500, 100): (3.798801810, 5.043321511, 2.240159622),
}
# Prefix sums times sensitivity.
SEARCHED = {
    (2, 50, 10): 5.621146,
    (4, 50, 10): 5.537137,
    (16, 50, 10): 5.433684,
    (2, 500, 100): 9.040885,
    (4, 500, 100): 7.920910,
    (16, 500, 100): 7.180919,
}
# (buffers, steps, separation): the same.
BUFFERED = {
    (1, 100, 100): 2.382665,
    (2, 100, 100): 2.320783,
    (3, 100, 100): 2.320035,
    (1, 100, 20): 6.027521,
    (4, 100, 20): 6.024905,
    (1, 1000, 1000): 3.443695,
    (2, 1000, 1000): 3.075844,
    (3, 1000, 1000): 3.051082,
    (1, 1000, 200): 8.030830,
    (2, 1000, 200): 7.656869,
    (4, 1000, 200): 7.653883,
}


def sensitivity(strategy, separation):
    times = -(-strategy.steps // separation)
    return strategy.sensitivity(Participation(separation, times))


@pytest.mark.parametrize("case", INVERSE_BANDED)
def test_inverse_square_roots_are_theirs(case):
    bands, steps, separation = case
    strategy = InverseBanded(bands, steps)
    found = strategy.prefix_error(), strategy.last_error()
    found += (sensitivity(strategy, separation),)
    assert found == pytest.approx(INVERSE_BANDED[case], rel=1e-8)


@pytest.mark.parametrize(
    "kind, case, theirs",
    [(InverseBanded, *item) for item in SEARCHED.items()]
    + [(BufferedToeplitz, *item) for item in BUFFERED.items()],
)
def test_searches_find_as_little_noise_as_theirs(kind, case, theirs):
    """Either search may end in an optimum that is not the least of all."""
    size, steps, separation = case
    strategy = kind(size, steps, separation=separation)
    found = strategy.prefix_error() * sensitivity(strategy, separation)
    assert 0.98 * theirs < found < 1.001 * theirs
