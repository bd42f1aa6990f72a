"""Noise that takes back fading sums of all steps before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from opacus_ext.strategies.strategy import (
    Filter,
    Strategy,
    add_combined,
    check_whole,
    least,
)

_CLOSE = -30.0  # log of the least 1 - decay


class Buffers(NamedTuple):
    """
    The buffers of a buffered linear Toeplitz matrix: entry k of its first column is the
    sum over the buffers of ``weight * decay^(k - 1)``, and 1 for k = 0.
    """

    weights: Tuple[float, ...]
    decays: Tuple[float, ...]


@dataclass(frozen=True)
class BufferedToeplitz(Strategy):
    """
    A buffered linear Toeplitz matrix C ("BLT"): entries fall off as a sum of d
    exponentials. Few buffers nearly serve as well as a full matrix; sampling does not
    amplify privacy.

    Source: Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, "Efficient and
    Near-Optimal Noise Generation for Streaming Differential Privacy", arXiv 2404.16706;
    for several participations McMahan, Xu and Zhang 2024, "A Hassle-free Algorithm for
    Strong Differential Privacy in Federated Learning Systems", arXiv 2408.08868.

    Args:
        buffers: d; the optimizer keeps d times the model's size
        separation: least steps between two of one record, for which the noise is to be
            best: the steps of an epoch. By default a record has one step

    Example:
        >>> noise = BufferedToeplitz(buffers=2, steps=100)
        >>> alone = BufferedToeplitz(buffers=1, steps=100)
        >>> f"{noise.prefix_error():.3f} {alone.prefix_error():.3f}"
        '2.321 2.383'
    """

    buffers: int
    steps: int
    momentum: float = 0.0
    separation: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("buffers", self.buffers, 10)
        if self.separation is not None:
            check_whole("separation", self.separation)

    @property
    def can_redraw(self) -> bool:
        """False: the buffers would fade twice."""
        return False

    @property
    def parameters(self) -> Buffers:
        """Weights and decays of the buffers."""
        return _search(self)

    @property
    def filter(self) -> Filter:
        """The ratio of two polynomials, by the decays of C and of its inverse."""
        return _ratio(self.parameters)

    def row(self, past: Any, z: Any, step: int) -> Any:
        """
        See :meth:`Strategy.row`. ``past`` has the fading sums of earlier rows: those of
        the ring, as other strategies have them, would cancel to few digits.
        """
        weights, decays = self.parameters
        row = z.contiguous()
        add_combined(row, past, weights, -1)
        shape = (-1, *[1] * z.dim())
        past.mul_(past.new_tensor(decays).view(shape)).add_(row)
        return row.mul_(self.factor)


@lru_cache(maxsize=64)
def _search(strategy: BufferedToeplitz) -> Buffers:
    run = strategy.steps, strategy.momentum, strategy.separation
    numbers = np.array([])
    for count in range(1, strategy.buffers + 1):
        # One buffer more, which fades at once, has the same noise; also from there.
        more = np.concatenate([np.insert(x, 0, -3.0) for x in np.split(numbers, 2)])
        starts = _start(count, strategy.steps), more
        found = [least(lambda x: _ratio(_buffers(x)), x, *run) for x in starts]
        numbers, _ = min(found, key=lambda result: result[1])
    return _buffers(numbers)


def _buffers(numbers: NDArray) -> Buffers:
    """Returns the buffers for the logs of their weights and of 1 - their decays."""
    weights, rest = np.split(np.minimum(numbers, 0.0), 2)
    decays = -np.expm1(np.maximum(rest, _CLOSE))
    return Buffers(tuple(map(float, np.exp(weights))), tuple(map(float, decays)))


def _start(count: int, steps: int) -> NDArray:
    """
    Returns buffers for ``(1 - x)^(-1/2)``, whose entries are integrals of decay^k /
    sqrt(decay (1 - decay)) / pi: one buffer for each of as many intervals.
    """
    edges = np.append(np.geomspace(1.0 / (2 * steps), 1.0, count + 1)[:0:-1], 0.0)
    # The integral over 1 - decay is 2 arcsin of its root, over pi.
    masses = -np.diff(2 / np.pi * np.arcsin(np.sqrt(edges)))
    middles = np.sqrt(edges[:-1] * np.maximum(edges[1:], edges[:-1] / 8))
    weights = masses * (1 - middles)
    return np.concatenate([np.log(np.maximum(weights, 1e-6)), np.log(middles)])


def _ratio(buffers: Buffers) -> Filter:
    """Returns ``C^-1``: C is 1 plus the sum of ``weight x / (1 - decay x)``."""
    decays = buffers.decays
    numerator = _product(decays)
    denominator = numerator.copy()
    for i, weight in enumerate(buffers.weights):
        others = _product(decays[:i] + decays[i + 1 :])
        denominator[1:] += weight * others
    return Filter(tuple(map(float, numerator)), tuple(map(float, denominator)))


def _product(decays: Tuple[float, ...]) -> NDArray:
    """Returns the coefficients of the product of ``1 - decay x``."""
    product = np.ones(1)
    for decay in decays:
        product = np.convolve(product, [1.0, -decay])
    return product
