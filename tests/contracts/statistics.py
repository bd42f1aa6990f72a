"""Tests of random samples against the distribution they should have.

Correct samples fail a comparison once in 1e9 times. A run of all contracts makes some
5,000 comparisons, and so fails for no reason once in 200,000 runs. Samples are drawn
from fresh entropy, not from a fixed seed.
"""

import math

import numpy as np
from scipy.stats import binom, chi2, kstest, norm

FALSE_ALARMS = 1e-9  # of each comparison
POWER = 1e-6  # noise of half the std passes this often at most
DEVIATIONS = norm.isf(FALSE_ALARMS / 2)


def has_variance_one(x, name=""):
    """Chi-square on both sides; refuses too few entries to see half the std."""
    x = np.asarray(x, dtype=np.float64).ravel()
    low, high = (f(FALSE_ALARMS / 2, len(x)) for f in (chi2.ppf, chi2.isf))
    assert chi2.sf(4 * low, len(x)) < POWER, f"{name}: {len(x)} entries are too few"
    assert low < x @ x < high, f"{name}: variance {x @ x / len(x):.3f}"


def is_normal(x, name=""):
    """The test of Kolmogorov and Smirnov."""
    x = np.asarray(x, dtype=np.float64).ravel()
    p = kstest(x, norm.cdf).pvalue
    assert p > FALSE_ALARMS, f"{name}: {p}"


def are_independent(x, y, name=""):
    """For given y, its product with an independent normal x has the std |y|."""
    n = min(np.size(x), np.size(y))
    x, y = (np.asarray(a, dtype=np.float64).ravel()[:n] for a in (x, y))
    score = x @ y / np.linalg.norm(y)
    assert abs(score) < DEVIATIONS, f"{name}: {score:.1f} deviations"


def repeats_nothing(x, least=1000):
    """
    Independent normal numbers have no autocorrelation at any distance.

    The product ``x A x`` of n numbers with those k places on has log E exp(s x A x) at
    most ``m (s^2 / 2 + 0.8 s^4)``, m = n - k, for s below 0.3; so for m of 1,000 and
    more it is above 9 sqrt(m) with a probability below 1e-15 (s = 9 / sqrt(m)). With
    2e5 distances, on both sides, that is below 1e-9.
    """
    x = np.asarray(x, dtype=np.float64).ravel()
    assert least <= len(x) <= 4e5
    size = 2 ** math.ceil(math.log2(2 * len(x)))
    products = np.fft.irfft(np.abs(np.fft.rfft(x, size)) ** 2, size)
    overlaps = np.arange(len(x), least, -1)[1:]
    scores = products[1 : len(overlaps) + 1] / np.sqrt(overlaps)
    worst = int(np.abs(scores).argmax()) if len(scores) else None
    assert worst is None or abs(scores[worst]) < 9, f"at {worst + 1}: {scores[worst]}"


def fits(counts, probabilities, draws, name=""):
    """Each count by itself has the tails of a binomial distribution."""
    counts = np.asarray(counts, dtype=np.float64)
    p = np.broadcast_to(np.asarray(probabilities, dtype=np.float64), counts.shape)
    tails = np.minimum(binom.cdf(counts, draws, p), binom.sf(counts - 1, draws, p))
    worst = int(tails.argmin())
    said = f"{name}: {counts.flat[worst]:.0f} times, not {draws * p.flat[worst]:.0f}"
    assert tails.min() > FALSE_ALARMS / 2, said
