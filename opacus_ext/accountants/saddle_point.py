"""
The privacy profile of many equal steps of DP-SGD, as an integral in the complex plane.

delta(epsilon) for the removal of a user is (Alghamdi et al. 2023, "The Saddle-Point
Method in Differential Privacy"), with L the privacy loss of one of T steps,

    delta(epsilon) = 1 / (2 pi i) int exp(K(z) - z epsilon) / (z (z + 1)) dz,
    K(z) = T log E[exp(z L)],

along any vertical line Re z = t > 0. Unlike there nothing is expanded: the integral and
the expectation are trapezoidal sums of analytic functions, which converge
exponentially. A value that misses the stated precision is refused.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from typing import Callable, Iterator, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erfc, gammaln, log_ndtr

from opacus_ext.accountants.profiles import (
    gaussian,
    log_delta,
    sampled,
    unsampled_epsilon,
)

FAR = 38.0  # standard deviations: the mass beyond is less than any float
_PRECISION = 1e-5  # of delta, relative, despite all cancellation
_TOLERANCE = 1e-4  # of an integral, relative, before the last halving squares it
_STRICT = 1e-6  # the same for a check
_NODES = 2**20  # of the expectation
_FINEST = 2**15  # points of the integral over z
_CHUNK = 2**18  # entries of a matrix
_ENTRIES = 2**25  # of all matrices of an integral
_GRADING = 16.0  # widths of the saddle after which the points spread out


class TooHardError(ArithmeticError):
    """
    Raised when the sums need more points, or more digits, than there are. ``rough`` is
    about what the result would be, if that is known.
    """

    def __init__(self, rough: Optional[float] = None):
        super().__init__()
        self.rough = rough


class Work(threading.local):
    """
    A budget of computed array entries, of about 10 ns each. It is not a clock, so that
    every machine refuses the same arguments.
    """

    left = math.inf

    @contextmanager
    def bounded(self, entries: float) -> Iterator[None]:
        """Bounds all answers within the context together; contexts may be nested."""
        outer, allowed = self.left, min(entries, self.left)
        self.left = allowed
        try:
            yield
        finally:
            self.left = outer - (allowed - self.left)

    def spend(self, entries: float) -> None:
        """Raises TooHardError if fewer entries are left."""
        self.left -= entries
        if self.left < 0:
            raise TooHardError


WORK = Work()


class SampledGaussian(NamedTuple):
    """
    One step, for a user with ``records`` that are sampled independently.

    The privacy loss is L(x) = log sum_j w_j exp((2 j x - j^2) / (2 noise^2)), with w_j
    the binomial weights, at x ~ N(0, noise^2) without the user and ~ N(j, noise^2) with
    probability w_j with it: no user of so many records has more to lose (Charles et al.
    2024, "Fine-Tuning Large Language Models with User-Level Differential Privacy").
    """

    noise: float
    rate: float
    records: int

    @property
    def least(self) -> float:
        """The infimum of L."""
        return self.records * math.log1p(-self.rate)

    def log_binomial(self) -> NDArray:
        """Returns ``log w_j``, j from 0 to records."""
        k, j = self.records, np.arange(self.records + 1)
        log_choices = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1)
        return log_choices + j * math.log(self.rate) + (k - j) * math.log1p(-self.rate)

    def loss(self, x: NDArray) -> NDArray:
        """Returns ``L(x)``, [n] complex, precise where it is small."""
        return in_chunks(self._loss, x, self.records, 8)  # complex ones take longer

    def _loss(self, x: NDArray) -> NDArray:
        j = np.arange(1, self.records + 1)
        exponent = (2 * x[:, None] - j) * (j / (2 * self.noise**2))
        log_weight = self.log_binomial()[1:]
        log_term = exponent + log_weight
        every = np.append(log_term, np.full((len(x), 1), self.least), axis=1)
        largest = every[np.arange(len(x)), every.real.argmax(axis=1)]
        loss = largest + np.log(np.exp(every - largest[:, None]).sum(axis=1))

        # A small loss is log1p of sum_j w_j (exp(..) - 1), which loses no digits.
        near = np.abs(loss) < 0.5
        small = exponent[near].real < 1
        u = np.where(
            small,
            np.expm1(np.where(small, exponent[near], 0.0)) * np.exp(log_weight),
            np.exp(np.where(small, 0.0, log_term[near])) - np.exp(log_weight),
        ).sum(axis=1)
        loss[near] = log1p(u)
        return loss

    def inverse(self, loss: float) -> float:
        """Returns the x where L is ``loss``, within ``FAR`` of all outcomes."""
        s, q, k = self
        low, high = -FAR * s, k + FAR * s
        if k == 1:
            return min(0.5 + s * s * float(unsampled_epsilon(loss, q)), high)

        def excess(x: float) -> float:
            return self.loss(np.array([x + 0j]))[0].real - loss

        if excess(high) <= 0:
            return high
        return brentq(excess, low, high) if excess(low) < 0 else low


def in_chunks(
    f: Callable[[NDArray], NDArray], x: NDArray, width: int, cost: float = 1
) -> NDArray:
    """Returns ``f(x)``, with matrices of so many columns and few rows at a time."""
    WORK.spend(cost * len(x) * width)
    rows = max(1, _CHUNK // width)
    return np.concatenate([f(x[i : i + rows]) for i in range(0, len(x), rows)])


def log1p(u: NDArray) -> NDArray:
    """Returns log(1 + u) with the real part that numpy loses for a small complex u."""
    small = np.abs(u) < 0.5
    near = np.where(small, u, 0.0)
    real = 0.5 * np.log1p(2 * near.real + near.real**2 + near.imag**2)
    far = np.log(np.where(small | (u == -1), 1.0, 1 + u))
    return np.where(small, real + 1j * np.angle(1 + u), np.where(u == -1, -800.0, far))


class PrivacyLoss:
    """
    The law of a step's privacy loss, restricted to outcomes below a cut.

    It is a trapezoidal sum over a line above the real axis that bends down to the cut:
    ``E[exp(z L); x < cut]`` is the sum of ``exp(log_weight + z loss)`` for Im z >= 0. L
    is analytic up to a height of pi noise^2, where all its singularities are: sum_j w_j
    X^j has real roots, and the factors exp(-j^2 / 2 noise^2) keep them real (Polya and
    Schur). Up to there Im L >= 0, so exp(z L) is damped where it would oscillate, and
    one set of nodes serves all z.
    """

    def __init__(self, step: SampledGaussian, cut: float, fineness: float):
        s = step.noise
        scale = min(s, s * s)
        height = min(1.2 * s, math.pi / 3 * s * s)
        width = scale / 5 / fineness
        low, high = -8.7 * s, cut + 36 * scale
        if not (high - low) / width < _NODES:
            raise TooHardError
        y = (np.arange(low, high, width) + 1j * height - cut) / scale
        # x = cut - scale log(1 + exp(-y)), its last part without overflow
        past = y.real > 0
        decay = np.log1p(np.exp(np.where(past, -y, y)))
        x = cut + scale * (np.where(past, 0.0, y) - decay)
        self.loss = step.loss(x)
        jacobian = np.where(past, -y, 0.0) - decay
        self.log_weight = self.loss - (x / s) ** 2 / 2 + jacobian
        self.log_weight += math.log(width / s / math.sqrt(2 * math.pi))

    def tilted(self, tilt: float) -> Tuple[NDArray, NDArray, float]:
        """Returns losses, weights ~ exp(tilt L) that sum to 1, and their log sum."""
        log_weight = self.log_weight + tilt * self.loss
        top = log_weight.real.max()
        matters = log_weight.real > top - 46
        weight = np.exp(log_weight[matters] - top)
        total = weight.sum().real  # as along the real axis, where all of it is real
        return self.loss[matters], weight / total, top + math.log(total)

    def moments(self, tilt: float) -> Tuple[float, float]:
        """Returns mean and variance under the tilted law."""
        loss, weight, _ = self.tilted(tilt)
        mean = (weight @ loss).real
        return mean, max((weight @ (loss - mean) ** 2).real, 0.0)

    def slopes(self, steps: float, epsilon: float, t: float) -> Tuple[float, float]:
        """Returns both derivatives of ``K(t) - t epsilon - log(t (t + 1))``."""
        mean, variance = self.moments(t)
        first = steps * mean - epsilon - 1 / t - 1 / (t + 1)
        return first, steps * variance + 1 / t**2 + 1 / (t + 1) ** 2

    def saddle(self, steps: float, epsilon: float, t: float) -> float:
        """Returns about the least point of the integrand for t > 0, by Newton."""
        low, high = 0.0, math.inf
        for i in range(100):
            slope, curvature = self.slopes(steps, epsilon, t)
            change = slope / curvature
            if abs(change) < 0.1 * t and abs(change) * math.sqrt(curvature) < 0.5:
                return t
            low, high = (t, high) if slope < 0 else (low, t)
            t = min(max(t - change, t / 4), 4 * t)
            # Newton overshoots and creeps back where the law nearly has two parts.
            if not low < t < high or i % 3 == 2 and 0 < low < high < math.inf:
                t = math.sqrt(low * high)
        raise TooHardError


def log_profile(
    step: SampledGaussian,
    steps: float,
    epsilon: float,
    tilt: float = 1.0,
    fineness: float = 1.0,
) -> Tuple[float, float]:
    """
    Returns ``log delta(epsilon)``, in closed form if there is one, and the saddle
    point; the arguments are those of :func:`log_delta_of_steps`.
    """
    s, q, k = step
    if s == 0:
        return math.log(sampled_ever(q, steps * k)), tilt
    if q == 1 or steps == k == 1:
        closed_form = sampled(gaussian(s / (k * math.sqrt(steps))), q)
        return log_delta(closed_form, epsilon), tilt
    return log_delta_of_steps(step, steps, epsilon, tilt, fineness)


def log_delta_of_steps(
    step: SampledGaussian,
    steps: float,
    epsilon: float,
    tilt: float = 1.0,
    fineness: float = 1.0,
) -> Tuple[float, float]:
    """
    Returns ``log delta(epsilon)`` of ``steps`` such steps, and the saddle point.

    Args:
        tilt: a guess at the saddle point
        fineness: of all sums; another one takes other nodes on other lines
    """
    s, _, k = step
    # A run in which a single step loses so much that the others can't make up for it
    # counts in full, by a closed form. The rest has no far tail, whose saddle point
    # would hide that of the bulk.
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

    t = law.saddle(steps, epsilon, tilt) / math.sqrt(fineness)
    width = 1 / math.sqrt(law.slopes(steps, epsilon, t)[1])
    loss, weight, log_sum = law.tilted(t)
    log_scale = steps * log_sum - t * epsilon + math.log(width / math.pi / t / (t + 1))
    if log_beyond - log_scale > 40:  # the rest would be lost in rounding
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
        excess = in_chunks(lambda y: _excess(y, loss, weight), y, len(loss))
        values = np.exp(steps * log1p(excess) - 1j * y * epsilon)
        values *= t * (t + 1) / (z * (z + 1)) * np.cosh(u / _GRADING)
        return values * erfc(7 * (y / window - 1)) / 2

    spacing = 0.5 / fineness
    count, last = 32, _GRADING * math.asinh(2 * window / scale) / spacing
    points = integrand(np.arange(1, count) * spacing)
    if last * len(loss) > _ENTRIES:
        raise TooHardError
    # With little noise, sums of a few great losses make the integrand rise again.
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
    Returns ``expm1(1j * outer(y, loss)) @ weight``, six times as fast in real numbers:
    with t = tan(b / 2), exp(i b) - 1 is 2 t (i - t) / (1 + t^2).
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
    """Returns ``log(P(A) - exp(epsilon) Q(A))``, A: a step's outcome exceeds cut."""
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


def sampled_ever(q: float, draws: float) -> float:
    """Returns the probability to be drawn at least once."""
    return -math.expm1(draws * math.log1p(-q)) if q < 1 else 1.0
