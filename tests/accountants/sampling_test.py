"""
Accounting of truncated Poisson sampling and of batches of fixed size, against the
mechanism itself: mixtures of Gaussians over every draw, with gradients chosen by an
adversary, integrated; and against dp_accounting.
"""

import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
from scipy.special import comb
from scipy.stats import binom, norm

from opacus_ext import Refused
from opacus_ext.accountants import PRVBoundsAccountant, composition
from opacus_ext.accountants.truncation import cut_probability, kept_rate
from opacus_ext.data import FixedSize, Poisson, TruncatedPoisson

EPSILONS = 0.0, 0.3, 1.0, 2.0, 4.0


def accountant(mechanism, **parameters):
    made = PRVBoundsAccountant()
    made.compose(mechanism, **parameters)
    return made


def fixed(noise, rate, steps=1):
    given = {"noise_multiplier": noise, "sample_rate": rate}
    return accountant("fixed_size", participations=steps, **given)


def truncated(noise, rate, records, most, steps=1):
    given = {"noise_multiplier": noise, "sample_rate": rate, "records": records}
    given.update(max_batch_size=most, participations=steps)
    return accountant("truncated_poisson", **given)


def fixed_size_draws(gradients, size):
    """The sum of each batch, and its probability."""
    batches = [*itertools.combinations(gradients, size)]
    return [(sum(batch), 1 / len(batches)) for batch in batches]


def truncated_draws(gradients, q, most):
    found = []
    for k in range(len(gradients) + 1):
        p = q**k * (1 - q) ** (len(gradients) - k)
        for drawn in itertools.combinations(gradients, k):
            kept = [*itertools.combinations(drawn, min(k, most))]
            found += [(sum(batch), p / len(kept)) for batch in kept]
    return found


X = np.linspace(-24, 24, 9601)


def density(draws, noise):
    return sum(p * norm.pdf(X, mean, noise) for mean, p in draws)


def hockey_stick(first, second, epsilon):
    excess = np.maximum(first - math.exp(epsilon) * second, 0)
    return float(np.sum(excess) * (X[1] - X[0]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_fixed_size_covers_every_exchange(size, noise):
    """All gradients of three records in {-1, 0, 1}, one of them exchanged."""
    made, worst = fixed(noise, size / 3), {}
    for others in itertools.product((-1.0, 0.0, 1.0), repeat=2):
        for mine, other in itertools.product((-1.0, 0.0, 1.0), repeat=2):
            first, second = (
                density(fixed_size_draws((*others, g), size), noise)
                for g in (mine, other)
            )
            for epsilon in EPSILONS:
                found = hockey_stick(first, second, epsilon)
                worst[epsilon] = max(worst.get(epsilon, 0.0), found)
    for epsilon, found in worst.items():
        bounds = made.get_delta(epsilon)
        assert found <= bounds.upper * (1 + 1e-4) + 1e-9, epsilon
        # It is reached where all others are opposite: the accounting is exact.
        assert found >= bounds.upper * (1 - 1e-3) - 1e-9, epsilon


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("q", [0.2, 0.7])
def test_truncation_covers_every_removal_and_addition(most, q):
    """Three records and one more, with gradients in {-1, 0, 1}."""
    noise, records = 0.9, 3
    made = truncated(noise, q, records, most)
    upper = {e: made.get_delta(e).upper * (1 + 1e-4) + 1e-9 for e in EPSILONS}
    for others in itertools.product((-1.0, 0.0, 1.0), repeat=records):
        less = density(truncated_draws(others, q, most), noise)
        more = density(truncated_draws((*others, 1.0), q, most), noise)
        for epsilon in EPSILONS:
            assert hockey_stick(more, less, epsilon) <= upper[epsilon]
            assert hockey_stick(less, more, epsilon) <= upper[epsilon]


def test_two_steps_of_fixed_size_in_which_the_data_sets_change_roles():
    """
    In the first the others are opposite to the record of one data set, in the second
    to that of the other: the larger epsilon of the two orders is not meant for this.
    """
    noise, x = 1.5, X[::8]
    made = fixed(noise, 1 / 3, 2)

    def densities(other):
        return [
            sum(p * norm.pdf(x, m, noise) for m, p in fixed_size_draws(gradients, 1))
            for gradients in ((other, other, 1.0), (other, other, -1.0))
        ]

    for epsilon in (0.1, 0.5, 1.0):
        found = []
        for one, two in itertools.product((1.0, -1.0), repeat=2):
            (a, b), (c, d) = densities(one), densities(two)
            excess = np.outer(a, c) - math.exp(epsilon) * np.outer(b, d)
            found.append(float(np.maximum(excess, 0).sum() * (x[1] - x[0]) ** 2))
        upper = made.get_delta(epsilon).upper
        assert 0.8 * upper < max(found) <= upper * (1 + 1e-4)


def test_fixed_size_against_dp_accounting():
    """
    dp_accounting 0.6's RdpAccountant(REPLACE_ONE) on SampledWithoutReplacementDpEvent
    of a Gaussian of half the noise multiplier (Wang, Balle and Kasiviswanathan, 2019):
    an upper bound that is looser.
    """
    for noise, size, records, steps, delta, rdp in (
        (4.0, 100, 10_000, 1000, 1e-5, 1.445298242121019),
        (8.0, 64, 1000, 2000, 1e-6, 8.161612507590629),
        (1.0, 1, 100, 50, 1e-3, 6.064482984661825),
    ):
        bounds = fixed(noise, size / records, steps).get_bounds(delta)
        assert 0.3 * rdp < bounds.lower <= bounds.upper < rdp


# The last: dp_accounting 0.6's PLD of TruncatedSubsampledGaussianDpEvent.
TRUNCATED = [
    (1.0, 0.01, 50_000, 640, 1000, 1e-5, 1.8282448611453523),
    (1.0, 0.01, 50_000, 660, 1000, 1e-5, 1.8282436489491534),
    (0.8, 0.1, 1000, 160, 100, 1e-4, 9.329346170338399),
]


@pytest.mark.parametrize("noise, q, records, most, steps, delta, other", TRUNCATED)
def test_truncation_against_dp_accounting_and_total_variation(
    noise, q, records, most, steps, delta, other
):
    made = truncated(noise, q, records, most, steps)
    bounds = made.get_bounds(delta)
    assert bounds.lower <= other <= bounds.upper * (1 + 1e-3)
    assert bounds.upper <= other * 1.001
    # Chua et al. (2024): all T steps are within T times the tail of Poisson sampling.
    poisson = PRVBoundsAccountant()
    poisson.history = [(noise, q, steps)]
    assert bounds.upper >= poisson.get_bounds(delta).lower
    extra = steps * binom.sf(most, records + 1, q) * (1 + math.exp(bounds.upper))
    if extra < delta / 2:
        assert bounds.upper <= poisson.get_epsilon(delta - extra) * (1 + 1e-3)


def test_probabilities_are_exact_for_tiny_tails():
    """Sums of the binomial's terms, in whole numbers and fractions of two."""
    n, most, q = 60, 50, 0.25
    terms = [comb(n, k, exact=True) * 3 ** (n - k) for k in range(n + 1)]
    expected = sum(terms[most:]) / 4**n
    assert math.isclose(cut_probability(q, n, most), expected, rel_tol=1e-12)
    assert expected < 1e-19
    # One record among four, by hand: drawn, and kept beside others.
    found = kept_rate(0.5, 4, 2)
    by_hand = 0.5 * sum(math.comb(3, k) / 8 * min(1, 2 / (k + 1)) for k in range(4))
    assert math.isclose(found, by_hand, rel_tol=1e-12)


def test_more_room_is_never_worse_and_ends_at_poisson():
    found = [
        truncated(1.0, 0.05, 1000, most, 100).get_epsilon(1e-5)
        for most in (50, 60, 75, 90, 1001)
    ]
    assert found == sorted(found, reverse=True)
    poisson = PRVBoundsAccountant()
    poisson.history = [(1.0, 0.05, 100)]
    assert found[-1] == poisson.get_epsilon(1e-5)


def test_truncated_and_poisson_steps_are_composed():
    made = truncated(1.0, 0.05, 1000, 1000, 60)
    made.history = [(1.0, 0.05, 40)]
    made.compose("laplace", noise_multiplier=5.0)
    poisson = PRVBoundsAccountant()
    poisson.history = [(1.0, 0.05, 100)]
    poisson.compose("laplace", noise_multiplier=5.0)
    assert math.isclose(made.get_epsilon(1e-5), poisson.get_epsilon(1e-5), rel_tol=1e-9)


def test_many_noises_of_a_schedule_are_rounded_to_bounds():
    made = PRVBoundsAccountant()
    for noise in np.linspace(2.0, 2.2, 12):
        made.compose("fixed_size", noise_multiplier=noise, sample_rate=0.05)
    exact = made.get_bounds(1e-5)
    with patch.object(composition, "_DISTINCT", 3):
        bounds = made.get_bounds(1e-5)
    assert exact.upper < bounds.upper < 1.1 * exact.upper
    assert 0.9 * exact.lower < bounds.lower < exact.lower


@pytest.mark.parametrize("mechanism", ["fixed_size", "truncated_poisson"])
def test_state_and_steps_without_noise(mechanism):
    sizes = {} if mechanism == "fixed_size" else {"records": 50, "max_batch_size": 20}
    made = accountant(mechanism, noise_multiplier=3.0, sample_rate=0.2, **sizes)
    made.compose(mechanism, noise_multiplier=3.0, sample_rate=0.2, **sizes)
    assert len(made) == 1 and made.mechanisms[0]["participations"] == 2
    other = PRVBoundsAccountant()
    other.load_state_dict(made.state_dict())
    assert other.get_bounds(1e-4) == made.get_bounds(1e-4)
    made.compose(mechanism, noise_multiplier=0.0, sample_rate=0.2, **sizes)
    assert made.get_epsilon(1e-4) == math.inf


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"sample_rate": 1.5}, "sample_rate=1.5"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"records": 0}, "records=0.0"),
        ({"max_batch_size": 1.5}, "max_batch_size=1.5"),
    ],
)
def test_parameters_that_cannot_be(parameters, message):
    right = dict(noise_multiplier=1.0, sample_rate=0.1, records=9, max_batch_size=3)
    with pytest.raises(Refused, match=message):
        accountant("truncated_poisson", **{**right, **parameters})


def test_neighbors_of_two_kinds_are_not_composed():
    made = fixed(1.0, 0.1)
    with pytest.raises(Refused, match="can't be composed"):
        made.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(Refused, match="can't be composed"):
        made.compose("laplace", noise_multiplier=5.0)
    assert len(made) == 1
    made.history = [(1.0, 0.1, 3)]  # as Opacus sets it
    with pytest.raises(Refused, match="can't be composed"):
        made.get_epsilon(1e-5)
    with pytest.raises(Refused, match="can't be composed"):
        PRVBoundsAccountant().load_state_dict(made.state_dict())
    other = PRVBoundsAccountant()
    other.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(Refused, match="can't be composed"):
        other.compose("fixed_size", noise_multiplier=1.0, sample_rate=0.1)


def test_schemes_say_what_they_cost():
    """At the same noise: Poisson, cut, of fixed size."""
    found = []
    for sampling in (
        Poisson(expected_batch_size=100),
        TruncatedPoisson(expected_batch_size=100, max_batch_size=160),
        FixedSize(batch_size=100),
    ):
        made = PRVBoundsAccountant()
        sampling.account(made, 10_000, noise_multiplier=2.0, steps=1000)
        found.append(made.get_epsilon(1e-5))
    assert found[0] <= found[1] < 1.001 * found[0] and 2 * found[0] < found[2]
