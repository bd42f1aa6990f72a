"""
Privacy profiles of mechanisms: delta as a function of epsilon.

A *profile* is a function of the privacy loss ``t``, a float64 array: the hockey-stick
divergence delta(t), minus its least value for any mechanism, ``max(0, 1 - exp(t))``.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, ndtr

Profile = Callable[[NDArray], NDArray]


def _symmetric(delta: Profile, t: NDArray) -> NDArray:
    """The profile of a mechanism that treats the two data sets alike."""
    return delta(np.abs(t)) * np.exp(np.minimum(t, 0))


def _mills(x: NDArray) -> NDArray:
    """Mills' ratio: the Gaussian's tail over its density."""
    return math.sqrt(math.pi / 2) * erfcx(x * math.sqrt(0.5))


def _gaussian_delta(mu: float, t: NDArray) -> NDArray:
    # Phi(-x) - exp(t) Phi(-y) = phi(x) (R(x) - R(y)), R being Mills' ratio, keeps its
    # digits where both terms are tiny.
    x, y = t / mu - mu / 2, t / mu + mu / 2
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    with np.errstate(over="ignore", invalid="ignore"):
        if mu < 0.02:  # R(x) - R(y) is the integral of -R'(s) = 1 - s R(s)
            nodes, weights = np.polynomial.legendre.leggauss(4)
            points = ((t / mu) + mu / 2 * node for node in nodes)
            integral = sum(w * (1 - s * _mills(s)) for w, s in zip(weights, points))
            return density * mu / 2 * integral
        tail = density * (_mills(x) - _mills(y))
        body = ndtr(-x) - density * _mills(y)
    return np.where(x < 0, body, tail)


def gaussian(noise_multiplier: float) -> Profile:
    """Returns the Gaussian mechanism's profile (Balle and Wang, 2018, theorem 8)."""
    return partial(_symmetric, partial(_gaussian_delta, 1 / noise_multiplier))


def log_delta(profile: Profile, epsilon: float) -> float:
    """Returns the log of delta; -1e6 where delta is too small for a float."""
    value = delta_at(profile, epsilon)
    return math.log(value) if value > 0 else -1e6


@lru_cache(maxsize=4096)
def gaussian_sensitivity(epsilon: float, log_target: float) -> float:
    """
    Returns the largest sensitivity, in standard deviations of the noise, that keeps to
    a budget: to a relative 1e-13, and never one that exceeds the budget.

    Args:
        log_target: the log of the budget's delta
    """

    def excess(log_mu: float) -> float:
        spent = -log_delta(gaussian(math.exp(-log_mu)), epsilon)
        return math.log(-log_target / max(spent, 1e-300))

    tolerance = 1e-14
    log_mu = brentq(excess, -35.0, 35.0, xtol=tolerance)
    while excess(log_mu) > 0:  # brentq may end on either side
        log_mu, tolerance = log_mu - 2 * tolerance, 2 * tolerance
    return math.exp(log_mu)


def unsampled_epsilon(epsilon: ArrayLike, sample_rate: float) -> NDArray:
    """
    Returns the epsilon of a mechanism on all records from its epsilon on a Poisson
    sample: log(1 + (exp(epsilon) - 1) / q).
    """
    epsilon, q = np.asarray(epsilon, dtype=float), sample_rate
    near = np.minimum(epsilon, 1.0)
    return np.where(
        epsilon > 1,
        epsilon - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(epsilon, 1))),
        np.log1p(np.maximum(np.expm1(near) / q, -1 + 1e-300)),
    )


def sampled(profile: Profile, sample_rate: float) -> Profile:
    """Returns the profile on a Poisson sample, when a record is removed."""

    def delta(t: NDArray) -> NDArray:
        # P - e^t Q = q (M - e^s Q) for P = (1 - q) Q + q M and q e^s = e^t - 1 + q.
        inside = t > np.log1p(-sample_rate)
        s = unsampled_epsilon(np.where(inside, t, 0.0), sample_rate)
        return np.where(inside, sample_rate * profile(s), 0.0)

    return profile if sample_rate == 1 else delta


def mixture(first: Profile, second: Profile, share: float) -> Profile:
    """
    Returns the profile of a mechanism that tosses a coin, shows it, and runs ``second``
    with probability ``share``, else ``first``.
    """
    return lambda t: (1 - share) * first(t) + share * second(t)


def turned(profile: Profile) -> Profile:
    """Returns the profile of an addition, from that of a removal, or the reverse."""

    def delta(t: NDArray) -> NDArray:
        with np.errstate(over="ignore"):
            # exp(t) profile(-t), which is at most 1
            return np.minimum(np.exp(np.minimum(t, 700)) * profile(-t), 1.0)

    return delta


def exchanged(profile: Profile) -> Profile:
    """
    Returns the profile of a mechanism on a sample of fixed size, drawn without
    replacement, when one record is exchanged for another.

    Let m of n records be drawn, q = m / n, and let x in data set D be x' in D'. The
    output is ``(1 - q) R + q A`` for D and ``(1 - q) R + q A'`` for D': R is the law
    where the record was not drawn and A, A' where it was. A is the mean over sets of
    m - 1 other records, each with x; A' the same with x'; and R the same with one more
    of the other records, at random. So A and A', and A and R, are mixtures of outputs
    on samples that differ in one record, and by joint convexity no further apart than
    (P, Q), which dominates the mechanism for an exchange. By advanced joint convexity
    (Balle, Barthe and Gaboardi, 2018, theorem 2), for alpha >= 1

        H_alpha(D, D') <= q H_(1 + (alpha - 1) / q)(P, Q) = H_alpha((1 - q) Q + q P, Q),

    the profile of a removal under Poisson sampling. Neighbors can change places, so
    for alpha < 1 ``H_alpha(D, D') = alpha H_(1 / alpha)(D', D) + 1 - alpha`` is bounded
    by the same. Both together are what is returned (Zhu, Dong and Wang, 2022, theorem
    11), and profiles that dominate each step dominate the composition (there, theorem
    10). To compose the two orders separately and take the larger epsilon would be too
    little (Lebeda et al., 2024).

    Args:
        profile: of ``(1 - q) Q + q P`` and Q, from :func:`sampled`; the distance of P
            and Q is that of an exchange, for a sum of clipped gradients twice the bound
    """
    return partial(_symmetric, profile)


def delta_at(profile: Profile, epsilon: float) -> float:
    """Returns one value; at epsilon 0 the distance of the two output distributions."""
    return float(profile(np.array([epsilon]))[0])
