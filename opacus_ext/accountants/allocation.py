"""
The Gaussian mechanism with random allocation: each record is in one of t batches.

With x in batch i the outputs of the t steps are ``N(e_i, s^2 I)``, without x ``N(0, s^2
I)``, s being the noise multiplier. So the likelihood ratio is the mean S of t
independent numbers ``X = exp(z / s - 1 / (2 s^2))``, z normal, of mean 1 (Feldman and
Shenfeld, "Privacy amplification by random allocation", 2025; Chua et al., "Balls-and-
bins sampling for DP-SGD", 2024). For a removal ``delta(epsilon)`` is ``E[(S -
exp(epsilon))+]``, and for an addition ``E[(1 - exp(epsilon) S)+]``.

Both are convex in each X, and so is the delta of any composition. Therefore delta only
grows if the mass at a value is moved to two others with the same mean. Here these are
the neighbors on the grid ``exp(j r)``, on which the sum of points i and i + d is ``f(d)
= log(1 + exp(d r)) / r`` points above i: all pairs of a distance are split alike. The
sum of t numbers takes 2 log2(t) such convolutions, of positive numbers only, so that
tails keep their digits. The error is of second order in r, which follows the standard
deviation of log S. The package PLD_accounting of the authors convolves on such grids,
too, and rounds losses up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from opacus_ext.accountants.profiles import Profile, gaussian

# Points of the grid in a standard deviation of log S, and the most points of it.
_FINE = 24
_MOST = 6000
# Mass beyond the grid, which is counted: as infinite loss, or at a ratio of 0.
_CUT = 1e-30
_WIDEST = 680.0  # of a logarithm whose exp is to be a float


@dataclass(frozen=True)
class _Sum:
    """
    The distribution of a sum of likelihood ratios without x.

    Attributes:
        first: the number of the lowest point
        masses: probability of ``exp((first + k) * width)``, ``[points]``
        width: of the grid, as a logarithm
        zero: probability of 0
        lost: the part of the mean at infinity, where there is no probability
    """

    first: int
    masses: NDArray
    width: float
    zero: float = 0.0
    lost: float = 0.0

    @property
    def end(self) -> int:
        return self.first + len(self.masses)

    @property
    def logs(self) -> NDArray:
        return np.arange(self.first, self.end) * self.width

    def deviation(self) -> float:
        """Returns the standard deviation of the logarithm."""
        masses = self.masses / self.masses.sum()
        mean = masses @ self.logs
        return math.sqrt(masses @ (self.logs - mean) ** 2)

    def trimmed(self) -> _Sum:
        """Cuts tails off, whose mass is kept with its mean; rounding is undone."""
        masses = self.masses / (self.masses.sum() + self.zero)
        logs = self.logs
        weights = masses * np.exp(logs)
        above = np.cumsum(weights[::-1])[::-1]
        low = int(np.searchsorted(np.cumsum(masses), _CUT))
        high = int(np.searchsorted(-above, -_CUT * above[0]))
        high = min(max(high, low + 1), len(masses))
        kept = masses[low:high].copy()
        kept[-1] += masses[high:].sum()
        beyond = masses[high:] * np.exp(logs[high - 1])
        lost = self.lost + weights[high:].sum() - beyond.sum()
        to_lowest = masses[:low] * np.exp(logs[:low] - logs[low])
        kept[0] += to_lowest.sum()
        zero = self.zero + masses[:low].sum() - to_lowest.sum()
        first = self.first + low
        return replace(self, first=first, masses=kept, zero=zero, lost=lost)


def _ratio(noise_multiplier: float, width: float) -> _Sum:
    """Returns one X on a grid; the mass between two points goes to both."""
    std = 1 / noise_multiplier
    half = std * std / 2 + 11.6 * std  # beyond is less than the cut, for each mean
    first, last = math.floor(-half / width), math.ceil(half / width)
    nodes, weights = np.polynomial.legendre.leggauss(6)
    nodes, weights = (nodes + 1) / 2, weights / 2 * width
    z = (np.arange(first, last)[:, None] + nodes) * width / std + std / 2
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) / std * weights
    # Shares of the upper point: (exp(node) - 1) / (exp(width) - 1).
    upper = np.expm1(nodes * width) / math.expm1(width)
    lower = np.exp(nodes * width) * np.expm1((1 - nodes) * width) / math.expm1(width)
    masses = np.zeros(last - first + 1)
    masses[1:] += density @ upper
    masses[:-1] += density @ lower
    return _Sum(first, masses, width).trimmed()


def _add(a: _Sum, b: _Sum, finer: int = 1) -> _Sum:
    """
    Returns the sum of two independent numbers.

    Args:
        b: on the grid of ``a``, or one that is a whole number of times wider
        finer: the grid of the result is so many times finer than that of ``a``
    """
    wider = round(b.width / a.width)
    width, stride = a.width / finer, finer * wider  # of the result; of b on its grid
    distances = np.arange(
        a.first - wider * (b.end - 1), a.end - wider * b.first, dtype=np.int64
    )
    above = np.logaddexp(0.0, distances * a.width) / width
    whole = np.floor(above).astype(np.int64)
    shares = np.expm1((above - whole) * width) / math.expm1(width)
    first = min(finer * a.first, stride * b.first)
    last = math.ceil(np.logaddexp(a.logs[-1], b.logs[-1]) / width) + 1
    masses = np.zeros(last - first + 1)
    masses[finer * a.first - first :][: finer * len(a.masses) : finer] += (
        b.zero * a.masses
    )
    masses[stride * b.first - first :][: stride * len(b.masses) : stride] += (
        a.zero * b.masses
    )
    for distance, to, share in zip(distances.tolist(), whole.tolist(), shares.tolist()):
        # Points j of b of which a has the one that is so far above.
        from_lowest = wider * b.first + distance - a.first
        begin = max(0, -(from_lowest // wider))
        end = min(len(b.masses), (len(a.masses) - 1 - from_lowest) // wider + 1)
        if begin >= end:
            continue
        source = from_lowest + wider * begin
        both = b.masses[begin:end] * a.masses[source:][: wider * (end - begin) : wider]
        target = masses[stride * (b.first + begin) + to - first :]
        up = share * both
        target[1:][: stride * (end - begin) : stride] += up
        target[: stride * (end - begin) : stride] += both - up
    return _Sum(first, masses, width, a.zero * b.zero, a.lost + b.lost).trimmed()


def _sum_of(noise_multiplier: float, count: int) -> _Sum:
    """Returns the sum of so many ratios, from the binary digits of their number."""
    one = total = _ratio(noise_multiplier, 1 / (noise_multiplier * _FINE))
    for digit in f"{count:b}"[1:]:
        aim = total.deviation() / math.sqrt(2) / _FINE
        is_fine = total.width <= 1.5 * aim or 2 * len(total.masses) > _MOST
        total = _add(total, total, 1 if is_fine else 2)
        if digit == "1":
            total = _add(total, one)
    return total


@lru_cache(maxsize=64)
def allocated(noise_multiplier: float, batches: int) -> Profile:
    """
    Returns the profile of a removal, if each record is in one of so many batches: an
    upper bound, by less than 1 % of epsilon. Where noise is too little for a grid it is
    that of a batch of all records.
    """
    widest = 0.5 / noise_multiplier**2 + 11.6 / noise_multiplier + math.log(batches)
    if batches == 1 or widest > _WIDEST:
        return gaussian(noise_multiplier)
    total = _sum_of(noise_multiplier, batches)
    logs = total.logs - math.log(batches)
    ratios = np.exp(logs)
    gaps = np.diff(ratios)
    # E[(S - ratio)+] and E[(ratio - S)+] at each point; they are linear between points.
    above = np.cumsum(total.masses[::-1])[::-1]
    over = np.append(np.cumsum((gaps * above[1:])[::-1])[::-1], 0.0)
    over += total.lost / batches
    below = total.zero + np.cumsum(total.masses)
    under = total.zero * ratios[0] + np.append(0.0, np.cumsum(gaps * below[:-1]))

    def delta(t: NDArray) -> NDArray:
        ratio = np.exp(np.clip(t, logs[0], logs[-1]))
        lowest = total.zero * np.exp(np.minimum(t, logs[0]))
        inside = np.interp(ratio, ratios, under)
        left = np.where(t < logs[0], lowest, inside)
        return np.where(t >= 0, np.interp(ratio, ratios, over), left)

    return delta
