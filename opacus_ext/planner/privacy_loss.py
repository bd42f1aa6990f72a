"""
The privacy loss of one step of DP-SGD, as a law that can be integrated exactly.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from typing import Iterator, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln

from opacus_ext.accountants.profiles import unsampled_epsilon

FAR = 38.0  # standard deviations: less than any number is beyond
_NODES = 2**20  # of the expectation
_CHUNK = 2**18  # entries of a matrix


class TooHardError(ArithmeticError):
    """
    The sums would need more points, or more digits, than there are.

    Its argument, if any, is a rough value of what was asked for.
    """


class Work(threading.local):
    """
    What may still be computed for an answer, in entries of arrays; each takes a
    hundredth of a microsecond or so. It is no clock: what is answered is so on every
    machine.
    """

    left = math.inf
    rest = math.inf  # for several answers together

    @contextmanager
    def bounded(self, entries: float) -> Iterator[None]:
        """For all answers within it together; then each raises as :meth:`spend`."""
        self.rest = entries
        try:
            yield
        finally:
            self.rest = math.inf

    def spend(self, entries: float) -> None:
        """
        Raises:
            TooHardError: before so many are computed, if they are too many
        """
        self.left -= entries
        if self.left < 0:
            raise TooHardError


WORK = Work()


class SampledGaussian(NamedTuple):
    """
    One step, for a user with ``records`` that are sampled independently.

    The privacy loss is L(x) = log sum_j w_j exp((2 j x - j^2) / (2 noise^2)), with w_j
    the binomial weights, at x ~ N(0, noise^2) without the user and ~ N(j, noise^2) with
    probability w_j with it. (Charles et al. 2024, "Fine-Tuning Large Language Models
    with User-Level Differential Privacy", show that no user of so many records has more
    to lose.)
    """

    noise: float
    rate: float
    records: int

    @property
    def least(self) -> float:
        """The infimum of L."""
        return self.records * math.log1p(-self.rate)

    def log_binomial(self) -> NDArray:
        """``log w_j``, j from 0 to records."""
        k, j = self.records, np.arange(self.records + 1)
        log_choices = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1)
        return log_choices + j * math.log(self.rate) + (k - j) * math.log1p(-self.rate)

    def loss(self, x: NDArray) -> NDArray:
        """``L(x)``, [n] complex, precise where it is small."""
        WORK.spend(8 * len(x) * self.records)  # complex ones take longer
        rows = max(1, _CHUNK // self.records)
        parts = [self._loss(x[i : i + rows]) for i in range(0, len(x), rows)]
        return np.concatenate(parts)

    def _loss(self, x: NDArray) -> NDArray:
        j = np.arange(1, self.records + 1)
        exponent = (2 * x[:, None] - j) * (j / (2 * self.noise**2))
        log_weight = self.log_binomial()[1:]
        log_term = exponent + log_weight
        largest = np.append(log_term, np.full((len(x), 1), self.least), axis=1)
        rows = np.arange(len(x))
        largest = largest[rows, largest.real.argmax(axis=1)]
        terms = np.exp(log_term - largest[:, None]).sum(axis=1)
        loss = largest + np.log(terms + np.exp(self.least - largest))

        # a small loss as log1p of sum_j w_j (exp(..) - 1), of which nothing is lost
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
        """Where L is ``loss``, but no farther than anything is."""
        s, q, k = self
        low, high = -FAR * s, k + FAR * s
        if k == 1:
            return min(0.5 + s * s * float(unsampled_epsilon(loss, q)), high)

        def excess(x: float) -> float:
            return self.loss(np.array([x + 0j]))[0].real - loss

        if excess(high) <= 0:
            return high
        # any cut will do, if all go by the same
        return brentq(excess, low, high) if excess(low) < 0 else low


def log1p(u: NDArray) -> NDArray:
    """numpy's own loses the real part of a small complex number."""
    small = np.abs(u) < 0.5
    near = np.where(small, u, 0.0)
    real = 0.5 * np.log1p(2 * near.real + near.real**2 + near.imag**2)
    far = np.log(np.where(small | (u == -1), 1.0, 1 + u))
    return np.where(small, real + 1j * np.angle(1 + u), np.where(u == -1, -800.0, far))


class PrivacyLoss:
    """
    The law of a step's privacy loss, of those outcomes that lie below a cut.

    It stands as a trapezoidal sum over a line above the real axis that bends down to
    the cut: ``E[exp(z L); x < cut]`` is the sum of ``exp(log_weight + z loss)`` for
    Im z >= 0. L is analytic up to a height of pi noise^2, where all its singularities
    are: sum_j w_j X^j has real roots, and the factors exp(-j^2 / 2 noise^2) keep them
    real (Polya and Schur). Up to there Im L >= 0, so exp(z L) is damped where it would
    oscillate, and one set of nodes will do for all z.
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
        """The losses, weights ~ exp(tilt L) that sum to 1, and what log they had."""
        log_weight = self.log_weight + tilt * self.loss
        top = log_weight.real.max()
        matters = log_weight.real > top - 46
        weight = np.exp(log_weight[matters] - top)
        total = weight.sum().real  # as along the real axis, where all of it is real
        return self.loss[matters], weight / total, top + math.log(total)

    def moments(self, tilt: float) -> Tuple[float, float]:
        """Mean and variance under the tilted law."""
        loss, weight, _ = self.tilted(tilt)
        mean = (weight @ loss).real
        return mean, max((weight @ (loss - mean) ** 2).real, 0.0)
