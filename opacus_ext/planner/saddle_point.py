"""
The privacy profile of many steps, as an integral in the complex plane.

delta(epsilon) of the removal of a user is (Alghamdi et al. 2023, "The Saddle-Point
Method in Differential Privacy"), with L the privacy loss of one of T steps,

    delta(epsilon) = 1 / (2 pi i) int exp(K(z) - z epsilon) / (z (z + 1)) dz,
    K(z) = T log E[exp(z L)],

along any vertical line Re z = t > 0. Unlike there nothing is expanded: both integrals,
this one and the expectation, are trapezoidal sums of analytic functions, which converge
exponentially. There is no grid of losses that could be too coarse. What can't be had to
the stated precision is refused.
"""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfc, log_ndtr

from opacus_ext.accountants.profiles import gaussian_log_delta, unsampled_epsilon
from opacus_ext.planner.privacy_loss import (
    FAR,
    WORK,
    PrivacyLoss,
    SampledGaussian,
    TooHardError,
    log1p,
)

_PRECISION = 1e-5  # of delta, relative, despite all cancellation
_TOLERANCE = 1e-4  # of an integral, relative, before the last halving squares it
_STRICT = 1e-6  # where that is not taken for granted
_FINEST = 2**15  # points of the integral over z
_CHUNK = 2**18  # entries of a matrix
_ENTRIES = 2**25  # of all of them
_GRADING = 16.0  # widths of the saddle after which the points spread out


def log_profile(
    step: SampledGaussian,
    steps: float,
    epsilon: float,
    tilt: float = 1.0,
    fineness: float = 1.0,
) -> Tuple[float, float]:
    """``log delta(epsilon)``, in closed form if there is one, and the saddle point."""
    s, q, k = step
    if s == 0:
        return math.log(sampled_ever(q, steps * k)), tilt
    if q == 1:
        return float(gaussian_log_delta(k * math.sqrt(steps) / s, epsilon)), tilt
    if steps == k == 1:
        log_delta = gaussian_log_delta(1 / s, unsampled_epsilon(epsilon, q))
        return float(log_delta) + math.log(q), tilt
    return log_delta_of_steps(step, steps, epsilon, tilt, fineness)


def log_delta_of_steps(
    step: SampledGaussian,
    steps: float,
    epsilon: float,
    tilt: float = 1.0,
    fineness: float = 1.0,
) -> Tuple[float, float]:
    """
    ``log delta(epsilon)`` of ``steps`` such steps, and the saddle point.

    Args:
        tilt: a guess at the saddle point
        fineness: of all sums, which then take other nodes on other lines, and more
    """
    s, _, k = step
    # A run in which a single step loses so much that the others can't make up for it
    # counts in full, by a closed form. What remains has no far tail: there the saddle
    # would be that of a tail that nobody sees, instead of that of the bulk.
    law = PrivacyLoss(step, k + FAR * s, fineness)
    mean, variance = law.moments(0.0)
    rare = 23.0  # - log of the chance that the others do: Bernstein's inequality
    room = math.sqrt(2 * rare * steps * variance) + rare * (mean - step.least)
    room = epsilon + min(room, -steps * step.least)
    cut = step.inverse(epsilon + room)
    if cut < k + FAR * s:
        law = PrivacyLoss(step, cut, fineness)
    if steps * law.loss[-1].real <= epsilon:
        return -1e6, tilt  # less than any number
    log_beyond = _log_beyond(step, steps, epsilon, cut)

    t = _saddle(law, steps, epsilon, tilt) / math.sqrt(fineness)
    width = 1 / math.sqrt(_slopes(law, steps, epsilon, t)[1])
    loss, weight, log_sum = law.tilted(t)
    log_scale = steps * log_sum - t * epsilon + math.log(width / math.pi / t / (t + 1))
    if log_beyond - log_scale > 40:  # all else would be lost in rounding
        return log_beyond, t
    beyond = math.exp(log_beyond - log_scale)

    # Where most steps count, the law of the sum is smooth, and the integrand vanishes
    # within a few widths of the saddle. But runs that hardly saw the user are nearly an
    # atom, at the least of all sums, and do not vanish. They and the cut are ``room``
    # away from epsilon, and a smooth window takes out what is far away.
    window = max(110 / room, 8 * s, 20 * width)
    scale = _GRADING * width

    def integrand(u: NDArray) -> NDArray:
        y = scale * np.sinh(u / _GRADING)
        z = t + 1j * y
        WORK.spend(len(y) * len(loss))
        rows = max(1, _CHUNK // len(loss))
        excess = [
            _excess(y[i : i + rows], loss, weight) for i in range(0, len(y), rows)
        ]
        values = np.exp(steps * log1p(np.concatenate(excess)) - 1j * y * epsilon)
        values *= t * (t + 1) / (z * (z + 1)) * np.cosh(u / _GRADING)
        return values * erfc(7 * (y / window - 1)) / 2

    spacing = 0.5 / fineness
    count, last = 32, _GRADING * math.asinh(2 * window / scale) / spacing
    points = integrand(np.arange(1, count) * spacing)
    # little noise makes sums of a few great losses, after which it rises again
    if last * len(loss) > _ENTRIES:
        raise TooHardError
    if s < 0.5 or abs(points[-1]) > 1e-18:
        points = np.append(points, integrand(np.arange(count, last) * spacing))
        count = len(points) + 1
    lost = 1e-14 * spacing * (0.5 + np.abs(points).sum())
    coarse = spacing * (0.5 + points.real.sum())
    while count < _FINEST and count * len(loss) < _ENTRIES:
        between = integrand((np.arange(count) + 0.5) * spacing)
        fine = (coarse + spacing * between.real.sum()) / 2
        spacing, count = spacing / 2, 2 * count
        delta = fine + beyond
        if abs(fine - coarse) <= (_STRICT if fineness > 1 else _TOLERANCE) * delta:
            if lost > _PRECISION * delta:
                break
            return log_scale + math.log(delta), t
        coarse = fine
    raise TooHardError(log_scale + 0.5 * math.log(math.pi / 2))  # of a saddle


def _excess(y: NDArray, loss: NDArray, weight: NDArray) -> NDArray:
    """
    ``expm1(1j * outer(y, loss)) @ weight``, six times as fast in real numbers: with
    t = tan(b / 2), exp(i b) - 1 is 2 t (i - t) / (1 + t^2).
    """
    t = np.tan(np.outer(y, loss.real / 2))
    decay = np.expm1(np.outer(y, -loss.imag))
    imag = 2 * t / (1 + t * t)
    turned = -t * imag
    imag += decay * imag
    parts = np.stack([weight.real, weight.imag], axis=1)
    a, b = (turned + decay * (1 + turned)) @ parts, imag @ parts
    return a[:, 0] - b[:, 1] + 1j * (a[:, 1] + b[:, 0])


def _log_beyond(
    step: SampledGaussian, steps: float, epsilon: float, cut: float
) -> float:
    """``log(P(A) - exp(epsilon) Q(A))``, A: a step's outcome lies beyond the cut."""
    j = np.arange(step.records + 1)
    log_tails = log_ndtr((j - cut) / step.noise)
    log_binomial = step.log_binomial()
    of_one = np.array([np.logaddexp.reduce(log_tails + log_binomial), log_tails[0]])
    # log(1 - (1 - p)^T), of a p that may be too small to be a number
    none = steps * np.log1p(-np.exp(np.minimum(of_one, -1e-16)))
    some = np.where(none < -1e-300, np.log(-np.expm1(none - 1e-300)), -np.inf)
    some = np.where(none < -1e-10, some, of_one + math.log(steps))
    gap = epsilon + some[1] - some[0]
    return some[0] + math.log(-math.expm1(gap)) if gap < 0 else -math.inf


def _slopes(
    law: PrivacyLoss, steps: float, epsilon: float, t: float
) -> Tuple[float, float]:
    """First and second derivative of ``K(t) - t epsilon - log(t (t + 1))``."""
    mean, variance = law.moments(t)
    first = steps * mean - epsilon - 1 / t - 1 / (t + 1)
    return first, steps * variance + 1 / t**2 + 1 / (t + 1) ** 2


def _saddle(law: PrivacyLoss, steps: float, epsilon: float, t: float) -> float:
    """About where the integrand is least along the real axis, by Newton from ``t``."""
    low, high = 0.0, math.inf
    for i in range(100):
        slope, curvature = _slopes(law, steps, epsilon, t)
        change = slope / curvature
        if abs(change) < 0.1 * t and abs(change) * math.sqrt(curvature) < 0.5:
            return t
        low, high = (t, high) if slope < 0 else (low, t)
        t = min(max(t - change, t / 4), 4 * t)
        # where the law is nearly two, Newton overshoots and creeps back
        if not low < t < high or i % 3 == 2 and 0 < low < high < math.inf:
            t = math.sqrt(low * high)
    raise TooHardError


def sampled_ever(q: float, draws: float) -> float:
    """The chance to be drawn at all."""
    return -math.expm1(draws * math.log1p(-q)) if q < 1 else 1.0
