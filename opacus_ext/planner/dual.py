"""Values with their slopes by a law's parameters: forward differentiation."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np


class Dual:
    """
    A value and its derivatives, through sums, products, :func:`exp` and
    :func:`log_sum`: what laws are made of.

    Args:
        value: ``[*]``
        slope: by each parameter, ``[parameters, *]``

    Example:
        >>> x = Dual(np.array(2.0), np.array([1.0]))
        >>> (3.0 * x * x - x).slope, exp(x).slope.round(2)
        (array([11.]), array([7.39]))
    """

    __array_ufunc__ = None  # so that arrays leave sums and products with it to it

    def __init__(self, value: np.ndarray, slope: np.ndarray):
        self.value, self.slope = value, slope

    def __add__(self, other: Any) -> Dual:
        value, slope = _parts(other)
        return Dual(self.value + value, self.slope + slope)

    def __mul__(self, other: Any) -> Dual:
        value, slope = _parts(other)
        return Dual(self.value * value, self.slope * value + self.value * slope)

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    def __sub__(self, other: Any) -> Dual:
        return self + -other

    def __rsub__(self, other: Any) -> Dual:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__


def _parts(x: Any) -> Any:
    return (x.value, x.slope) if isinstance(x, Dual) else (x, 0.0)


def exp(x: Any) -> Any:
    """Of numbers, arrays and :class:`Dual`."""
    if not isinstance(x, Dual):
        return np.exp(x)
    value = np.exp(x.value)
    return Dual(value, value * x.slope)


def log_sum(*logs: Any) -> Any:
    """
    The log of the sum of exponentials, which broadcast.

    Example:
        >>> log_sum(np.log(2.0), np.log([3.0, 1.0])).round(4)
        array([1.6094, 1.0986])
    """
    values, slopes = zip(*map(_parts, logs))
    top = reduce(np.maximum, values)
    top = np.where(np.isfinite(top), top, 0.0)
    parts = [np.exp(value - top) for value in values]
    total = sum(parts)
    with np.errstate(divide="ignore"):
        value = np.log(total) + top
    if not any(isinstance(x, Dual) for x in logs):
        return value
    return Dual(value, sum(p / total * slope for p, slope in zip(parts, slopes)))
