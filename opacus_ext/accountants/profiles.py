"""
Privacy profiles of mechanisms: delta as a function of epsilon.

A *profile* is a function of the loss ``t``, a float64 array: the hockey-stick
divergence delta(t) less what it is for every mechanism, ``max(0, 1 - exp(t))``.

The Gaussian mechanism is here in two forms: delta itself, of which differences between
points of a grid are taken, and its log, for a delta too small for a number.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, ndtr

Profile = Callable[[np.ndarray], np.ndarray]


def _symmetric(delta: Callable[[np.ndarray], np.ndarray], t: np.ndarray) -> np.ndarray:
    """The profile where exchanging the two data sets changes nothing."""
    return delta(np.abs(t)) * np.exp(np.minimum(t, 0))


def _mills(x: np.ndarray) -> np.ndarray:
    """Mills' ratio: the Gaussian's tail over its density."""
    return math.sqrt(math.pi / 2) * erfcx(x * math.sqrt(0.5))


def _gaussian_delta(mu: float, t: np.ndarray) -> np.ndarray:
    # Phi(-x) - exp(t) Phi(-y) = phi(x) (R(x) - R(y)), R being Mills' ratio, keeps its
    # digits where both terms are tiny.
    x, y = t / mu - mu / 2, t / mu + mu / 2
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    with np.errstate(over="ignore", invalid="ignore"):
        if mu < 0.02:  # nearly equal: the integral of -R'(s) = 1 - s R(s)
            nodes, weights = np.polynomial.legendre.leggauss(4)
            at = ((t / mu) + mu / 2 * node for node in nodes)
            return (
                density
                * mu
                / 2
                * sum(w * (1 - s * _mills(s)) for w, s in zip(weights, at))
            )
        tail = density * (_mills(x) - _mills(y))
        body = ndtr(-x) - density * _mills(y)
    return np.where(x < 0, body, tail)


def gaussian(noise_multiplier: float) -> Profile:
    """
    The Gaussian mechanism (Balle and Wang, 2018, theorem 8).

    Example:
        >>> f"{gaussian(1.0)(np.array([0.0]))[0]:.4f}"
        '0.3829'
    """
    return partial(_symmetric, partial(_gaussian_delta, 1 / noise_multiplier))


def gaussian_log_delta(mu: ArrayLike, epsilon: ArrayLike) -> NDArray:
    """``log delta(epsilon)`` of N(0, 1), N(mu, 1) (Balle and Wang, 2018, theorem 5)."""
    upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    log_upper = log_ndtr(upper)
    gap = np.minimum(epsilon + log_ndtr(lower) - log_upper, -1e-300)
    return log_upper + np.log(-np.expm1(gap))


def gaussian_sensitivity(epsilon: ArrayLike, log_delta: ArrayLike) -> NDArray:
    """
    The sensitivity, in standard deviations of the noise, that spends the budget: the
    largest to 1e-13, and never one that spends more.
    """
    return np.vectorize(_sensitivity, otypes=[float])(epsilon, log_delta)


_WITHIN = 1e-14  # of the log of the sensitivity


@lru_cache(maxsize=4096)
def _sensitivity(epsilon: float, log_delta: float) -> float:
    def excess(log_mu: float) -> float:
        spent = -float(gaussian_log_delta(math.exp(log_mu), epsilon))
        return math.log(-log_delta / min(max(spent, 1e-300), 1e300))

    found = brentq(excess, -35.0, 35.0, xtol=_WITHIN)
    # On the side that spends less: brentq may end on either.
    step = 2 * _WITHIN
    while excess(found) > 0:
        found, step = found - step, 2 * step
    return math.exp(found)


def unsampled_epsilon(epsilon: ArrayLike, sample_rate: float) -> Any:
    """A mechanism's epsilon, from that of a sample: log(1 + (exp(epsilon) - 1) / q)."""
    q = sample_rate
    near = np.minimum(epsilon, 1.0)
    return np.where(
        np.greater(epsilon, 1),
        epsilon - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(epsilon, 1))),
        np.log1p(np.maximum(np.expm1(near) / q, -1 + 1e-300)),
    )


def _sampled(profile: Profile, sample_rate: float, t: np.ndarray) -> np.ndarray:
    if sample_rate == 1:
        return profile(t)
    # P - e^t Q = q (M - e^s Q) for P = (1 - q) Q + q M and q e^s = e^t - 1 + q.
    q = sample_rate
    inside = t > np.log1p(-q)
    s = unsampled_epsilon(np.where(inside, t, 0.0), q)
    return np.where(inside, q * profile(s), 0.0)


def sampled(profile: Profile, sample_rate: float) -> Profile:
    """
    A mechanism on a Poisson sample, for the removal of a record.

    Args:
        sample_rate: at most 1

    Example:
        >>> f"{sampled(gaussian(1.0), 0.1)(np.array([0.0]))[0]:.5f}"
        '0.03829'
    """
    return partial(_sampled, profile, sample_rate)


def _reversed(profile: Profile, t: np.ndarray) -> np.ndarray:
    found = profile(-t)
    with np.errstate(over="ignore"):
        return np.where(found > 0, found * np.exp(t), 0.0)


def reversed_(profile: Profile) -> Profile:
    """The same mechanism with the two data sets exchanged: a record is added."""
    return partial(_reversed, profile)


def _mixture(first: Profile, second: Profile, share: float, t: np.ndarray) -> Any:
    return (1 - share) * first(t) + share * second(t)


def mixture(first: Profile, second: Profile, share: float) -> Profile:
    """
    One mechanism or the other, by a coin that is shown.

    Args:
        share: the probability of the second

    Example:
        >>> f"{mixture(gaussian(1.0), pure(1.0), 0.5)(np.array([0.0]))[0]:.4f}"
        '0.4225'
    """
    return partial(_mixture, first, second, share)


def exchanged(profile: Profile) -> Profile:
    """
    A mechanism on a sample of fixed size, drawn without replacement, for a record that
    is exchanged for another one.

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

    Example:
        >>> exchange = exchanged(sampled(gaussian(0.5), 0.1))
        >>> [f"{x:.4f}" for x in exchange(np.array([-0.5, 0.0, 0.5]))]
        ['0.0200', '0.0683', '0.0330']
    """
    return partial(_symmetric, profile)


def laplace(noise_multiplier: float) -> Profile:
    """
    Laplace noise of scale ``noise_multiplier`` times the sensitivity.

    Example:
        >>> f"{laplace(1.0)(np.array([0.0]))[0]:.4f}"
        '0.3935'
    """
    top = 1 / noise_multiplier
    return partial(_symmetric, lambda t: -np.expm1(np.minimum(t - top, 0) / 2))


def pure(epsilon: float) -> Profile:
    """
    The worst of all mechanisms with this epsilon and a delta of 0: randomized response.

    Example:
        >>> f"{pure(1.0)(np.array([0.0]))[0]:.4f}"
        '0.4621'
    """
    scale = 1 / (1 + math.exp(-epsilon))
    return partial(_symmetric, lambda t: -np.expm1(np.minimum(t - epsilon, 0)) * scale)


def total_variation(profile: Profile) -> float:
    """The distance of the two output distributions: delta at epsilon 0."""
    return float(profile(np.zeros(1))[0])
