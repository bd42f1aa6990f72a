"""Noise that is a sum of the last few rows of independent noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from opacus_ext.strategies.strategy import Filter, Strategy, check_whole, least


@dataclass(frozen=True)
class InverseBanded(Strategy):
    """
    Banded ``C^-1``: the noise of a step is a sum of the last p rows of ``Z``. C itself
    has all bands, so that sampling does not amplify privacy.

    By default ``C^-1`` has the first coefficients of ``A^(-1/2)`` ("BISR"), which need
    no search and know nothing of participation. With ``separation`` they are searched
    for ("BandInvMF"). Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to
    Square Roots: An Optimal Bound on the Matrix Factorization Error for Multi-Epoch
    Differentially Private SGD", arXiv 2505.12128.

    Args:
        bands: p, of ``C^-1``; 1 is independent noise. The optimizer keeps p - 1 times
            the model's size
        separation: least steps between two of one record, for which the noise is to be
            best: the steps of an epoch

    Example:
        >>> InverseBanded(bands=4, steps=100).filter.numerator
        (1.0, -0.5, -0.125, -0.0625)
        >>> searched = InverseBanded(bands=4, steps=100, separation=25)
        >>> from opacus_ext.strategies import Participation
        >>> epochs = Participation(separation=25, times=4)
        >>> left = searched.prefix_error() * searched.sensitivity(epochs)
        >>> alone = InverseBanded(bands=1, steps=100)
        >>> f"{left / (alone.prefix_error() * alone.sensitivity(epochs)):.2f}"
        '0.37'
    """

    bands: int
    steps: int
    momentum: float = 0.0
    separation: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bands", self.bands, self.steps)
        if self.separation is not None:
            check_whole("separation", self.separation)

    @property
    def can_redraw(self) -> bool:
        """
        True if ``C^-1`` has no positive entry off its diagonal: the row that is drawn
        once more lacks one of its entries, so that C becomes less.
        """
        return max(self.filter.numerator[1:], default=0.0) <= 0

    @property
    def filter(self) -> Filter:
        """The polynomial of the coefficients."""
        return _filter(self)


@lru_cache(maxsize=64)
def _filter(strategy: InverseBanded) -> Filter:
    start = inverse_root(strategy.bands, strategy.momentum)
    if strategy.separation is None or strategy.bands == 1:
        return Filter(tuple(map(float, start)), (1.0,))
    found, _ = least(
        lambda rest: Filter((1.0, *rest), (1.0,)),
        start[1:],
        strategy.steps,
        strategy.momentum,
        strategy.separation,
    )
    return Filter((1.0, *map(float, found)), (1.0,))


def inverse_root(count: int, momentum: float) -> NDArray:
    """
    Returns the first coefficients of ``A^(-1/2)``, which is the square root of
    ``(1 - x) (1 - momentum x)``.
    """
    k = np.arange(1, count)
    root = np.cumprod(np.append(1.0, (k - 1.5) / k))
    other = root * momentum ** np.arange(count)
    return lfilter(root, [1.0], other)
