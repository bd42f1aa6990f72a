"""What a search costs, against the best of a mechanism's results, summed up exactly."""

import numpy as np
import pytest
from opacus.accountants.analysis.rdp import compute_rdp

from opacus_ext.planner import cost

ORDERS = np.array([1.5, 2.0, 4.0, 9.0, 30.0])


def divergence(order, p, q):
    """Renyi's, of two laws on a few results; the larger direction."""
    return max(
        np.log(np.sum(a**order * b ** (1 - order))) / (order - 1)
        for a, b in ((p, q), (q, p))
    )


def best_of(law, generating):
    """The law of the best result: G(F(y)) - G(F(y) - p(y)), with K's G(x) = E[x^K]."""
    below = np.concatenate([[0.0], np.cumsum(law)])
    return np.diff(generating(np.minimum(below, 1.0)))


@pytest.mark.parametrize("eta", [1.0, 0.0])
@pytest.mark.parametrize("trials", [1.001, 3.0, 40.0])
def test_random_stopping_bounds_the_best_of_a_random_number(eta, trials):
    gamma = cost.gamma_of(trials, eta)
    mean = 1 / gamma if eta else (1 / gamma - 1) / np.log(1 / gamma)
    assert mean == pytest.approx(trials)

    def generating(x):  # Papernot and Steinke, definition 1
        if eta == 0:
            return np.log1p(-(1 - gamma) * x) / np.log(gamma)
        return gamma * x / (1 - (1 - gamma) * x)

    rng, tight = np.random.default_rng(0), 0.0
    for _ in range(30):
        p = rng.dirichlet(np.ones(4))
        q = p * np.exp(0.3 * rng.uniform(-1, 1, 4))
        q /= q.sum()
        rdp = np.array([divergence(order, p, q) for order in ORDERS])
        bound = cost.random_stopping(ORDERS, rdp, trials, eta)
        one, other = best_of(p, generating), best_of(q, generating)
        found = np.array([divergence(order, one, other) for order in ORDERS])
        assert (found <= bound + 1e-12).all()
        tight = max(tight, (found / rdp).max())
    assert trials < 2 or tight > 1.2  # choosing does cost something


@pytest.mark.parametrize("noise, rate", [(0.2, 0.3), (1.0, 0.01), (9.0, 1.0)])
def test_divergences_are_those_of_opacus(noise, rate):
    orders = np.array([1.05, 1.7, 2.0, 10.9, 63.0])
    theirs = compute_rdp(q=rate, noise_multiplier=noise, steps=100, orders=orders)
    found = cost.renyi(orders, noise, rate, 100)
    assert found == pytest.approx(theirs, rel=1e-7)


def test_a_search_costs_little_more_for_more_trials():
    budget = 4.0, 1e-6, 1000, 0.01
    rows = cost.ways(*budget, trials=50)
    alone, geometric, _, composed = (row["noise_multiplier"] for row in rows)
    assert alone < geometric < composed
    few = cost.search_noise(*budget, trials=5)
    assert few < geometric < 1.5 * few
    rdp = cost.renyi(cost.ORDERS, geometric, 0.01, 1000)
    spent = cost.random_stopping(cost.ORDERS, rdp, 50)
    assert 3.98 < cost.epsilon_of(cost.ORDERS, spent, 1e-6) <= 4
