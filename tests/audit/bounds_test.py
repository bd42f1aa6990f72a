"""Bounds on mechanisms of known epsilon, and on ones with half the noise.

A lower bound may be above the truth in one audit of twenty; with 20 audits more than 5
would be a chance of 1e-3. The bounds are of coins and normal numbers, not of models.
"""

import math
from functools import partial

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from opacus_ext.accountants.composition import Composition
from opacus_ext.audit import bounds

DELTA, AUDITS = 1e-5, 20
COINS = np.random.default_rng(0)


def gaussian(coins, mu):
    return coins * mu + COINS.normal(size=len(coins))


def laplace(coins, epsilon):
    return coins * epsilon + COINS.laplace(size=len(coins))


def randomized_response(coins, epsilon):
    truth = COINS.random(len(coins)) < 1 / (1 + math.exp(-epsilon))
    return np.where(truth, coins, ~coins) + 0.001 * COINS.random(len(coins))


#: A mechanism, a parameter with half the noise of 1, and the epsilon it has at DELTA.
MECHANISMS = [
    pytest.param(gaussian, lambda x: bounds.gaussian_epsilon(x, DELTA), id="gaussian"),
    pytest.param(laplace, lambda x: x, id="laplace"),
    pytest.param(randomized_response, lambda x: x, id="randomized response"),
]


def once(mechanism, parameter, canaries=1000, share=0.2):
    coins = COINS.random(canaries) < 0.5
    guesses = int(canaries * share)
    right = bounds.guess(mechanism(coins, parameter), coins, guesses)
    return canaries, guesses, right


def gaussian_tradeoff(mu):
    return lambda a: float(ndtr(-ndtri(a) - mu))


def refuted(mechanism, parameter, test):
    """In how many audits a test refutes its claim."""
    return sum(test(*once(mechanism, parameter)) for _ in range(AUDITS))


@pytest.mark.parametrize("mechanism, epsilon", MECHANISMS)
def test_claims_are_refuted_where_they_are_wrong(mechanism, epsilon):
    """
    Right claims no more often than they may be. With half the noise the power is at
    least 0.9, of a Gaussian by its trade-off: epsilon would not tell.
    """

    def by_epsilon(*found, delta=DELTA):
        return bounds.epsilon_one_run(*found, delta) > epsilon(1.0)

    def by_tradeoff(*found):
        return bounds.f_dp_p_value(gaussian_tradeoff(1.0), *found) < 0.05

    most, strict = binom.ppf(0.999, AUDITS, 0.05), partial(by_epsilon, delta=0.0)
    assert refuted(mechanism, 1.0, by_epsilon) <= most
    if mechanism is gaussian:
        assert refuted(mechanism, 1.0, by_tradeoff) <= most
        strict = by_tradeoff
    assert refuted(mechanism, 2.0, strict) >= 18


@pytest.mark.parametrize("m, r, v", [(10, 10, 9), (12, 6, 6), (30, 20, 15)])
def test_p_values_of_pure_privacy_are_binomial(m, r, v):
    """With delta 0 the worst is randomized response, and f-DP claims no less."""
    exact = binom.sf(v - 1, r, 1 / (1 + math.exp(-0.5)))
    claim = bounds.approximate_tradeoff(0.5, 0.0)
    assert bounds.f_dp_p_value(claim, m, r, v) >= exact * 0.99


def test_delta_term():
    """Beside a mechanism that shows all coins with probability delta."""
    m, r, v, delta = 50, 20, 16, 1e-3
    shown = delta + (1 - delta) * binom.sf(v - 1, r, 0.5)
    claim = bounds.approximate_tradeoff(0.0, delta)
    assert bounds.f_dp_p_value(claim, m, r, v) >= shown


def test_the_least_total_is_what_a_distribution_reaches():
    """No distribution of N that obeys all constraints beats the p-value (an LP)."""
    m, r, v, slope = 12, 8, 7, math.exp(0.7)
    # Two lines bound g of (epsilon, 0): e^epsilon y and 1 - e^-epsilon (1 - y).
    j = np.arange(r + 1)
    rows, limits = [], []
    for i in range(v):
        left, right = j * (j > i) / m, (r - j) * (j >= i) / m
        rows += [left - slope * right, left - right / slope]
        limits += [0.0, 1 - 1 / slope]
    found = linprog(-1.0 * (j >= v), rows, limits, [np.ones(r + 1)], [1.0])
    claim = bounds.approximate_tradeoff(0.7, 0.0)
    assert bounds.f_dp_p_value(claim, m, r, v) == pytest.approx(-found.fun, rel=3e-3)


def test_tradeoffs_are_their_own_inverse():
    accountant = Composition()
    accountant.history.append((1.0, 0.5, 3))
    for claim in (
        gaussian_tradeoff(1.5),
        bounds.approximate_tradeoff(1.0, 0.1),
        bounds.accounted_tradeoff(accountant),
    ):
        for a in (0.01, 0.2, 0.5, 0.7):
            assert claim(claim(a)) <= a + 1e-9
            assert claim(0.0) <= 1 and claim(1.0) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("numbers", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_what_can_not_be_is_refused(numbers):
    with pytest.raises(ValueError, match="can't be"):
        bounds.f_dp_p_value(gaussian_tradeoff(1.0), *numbers)
    with pytest.raises(ValueError, match="can't be"):
        bounds.epsilon_one_run(*numbers, 0.0)
