"""Noise that takes back a part of the step before, and keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import numpy as np

from opacus_ext.refused import Refused
from opacus_ext.strategies.strategy import Filter, Strategy, check_whole, least


@dataclass(frozen=True)
class LambdaCGD(Strategy):
    """
    ``Z`` less a part lambda of its row before, which is drawn again from the state of
    the generator: the optimizer keeps nothing of the model's size, and draws twice. C
    has all bands, so that sampling does not amplify privacy. Source: "DP-lambda-CGD",
    arXiv 2601.22334.

    Args:
        correlation: lambda, from 0 to below 1; by default that which leaves the least
            noise
        separation: least steps between two of one record, for which the default is to
            be best: the steps of an epoch. By default a record has one step

    Example:
        >>> LambdaCGD(steps=100, correlation=0.5).filter.numerator
        (1.0, -0.5)
        >>> f"{LambdaCGD(steps=100, separation=25).filter.numerator[1]:.2f}"
        '-0.85'
    """

    steps: int
    correlation: Optional[float] = None
    momentum: float = 0.0
    separation: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separation is not None:
            check_whole("separation", self.separation)
        if self.correlation is not None and not 0 <= self.correlation < 1:
            raise Refused(
                f"correlation={self.correlation!r}.",
                parameter="correlation",
                remedy="Give a number from 0 to below 1, or leave it out.",
            )

    @property
    def draws_again(self) -> bool:
        """True: the row before is drawn again."""
        return True

    @property
    def memory(self) -> int:
        """Nothing."""
        return 0

    @property
    def filter(self) -> Filter:
        """One less lambda times the step before."""
        return Filter((1.0, -_correlation(self)), (1.0,))


@lru_cache(maxsize=64)
def _correlation(strategy: LambdaCGD) -> float:
    if strategy.correlation is not None:
        return float(strategy.correlation)
    found, _ = least(
        lambda numbers: Filter((1.0, -float(_share(numbers[0]))), (1.0,)),
        np.zeros(1),
        strategy.steps,
        strategy.momentum,
        strategy.separation,
    )
    return float(_share(found[0]))


def _share(number: float) -> float:
    """Returns a number between 0 and 1 for any number."""
    return float(1 / (1 + np.exp(-number)))
