"""
What all strategies of correlated noise have.

DP-SGD's weights are sums of noisy gradients, so what matters is the noise of the prefix
sums ``A G``, not that of each gradient. The matrix mechanism (Denisov et al. 2022) adds
``C^-1 Z`` to the gradients ``G``, with independent ``Z``: the sums then have the noise
``A C^-1 Z``, which a good C makes smaller than ``A Z``, at the sensitivity of ``C G``.

Here C is lower triangular and Toeplitz. Its first column is the series of a rational
function, and so is that of ``C^-1``, which the stream of noise computes from the few
numbers of numerator and denominator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opacus_ext.refused import Refused


@dataclass(frozen=True)
class Participation:
    """
    The steps that one record may take part in.

    Args:
        separation: the least difference of the numbers of two such steps, at least 1
        times: the most steps that it takes part in

    Example:
        >>> Participation(separation=100, times=3)  # once in each of three epochs
        Participation(separation=100, times=3)
    """

    separation: int
    times: int = 1

    def __post_init__(self) -> None:
        check_whole("separation", self.separation)
        check_whole("times", self.times)


class Filter(NamedTuple):
    """
    ``C^-1``, up to a factor, as a power series: numerator over denominator, by
    ascending powers. Both begin with 1.
    """

    numerator: Tuple[float, ...]
    denominator: Tuple[float, ...]


class Strategy(ABC):
    """
    A matrix C for the noise ``C^-1 Z``. It knows no optimizer and no parameters.

    Columns have an L2 norm of at most 1. So the noise multiplier of ``Z`` is that of a
    record which takes part in one step; it is divided by :meth:`sensitivity` for one
    that takes part in several.

    Args:
        steps: of the run, n; C is ``[n, n]``
        momentum: of SGD, or the first of Adam's betas: the noise is chosen to leave
            the least in weights that such steps have moved. Privacy does not depend
            on it

    Raises:
        Refused: for numbers that do not fit
    """

    steps: int
    momentum: float

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        if not 0 <= self.momentum < 1:
            raise Refused(
                f"A momentum of {self.momentum}.",
                parameter="momentum",
                remedy="Give the optimizer's, from 0 to below 1.",
            )

    @property
    @abstractmethod
    def filter(self) -> Filter:
        """``C^-1``, up to a factor."""

    @property
    def span(self) -> int:
        """
        Columns of C that are so many steps apart have no row in common, within the
        steps of the run; after more steps only if it :attr:`is_banded`.
        """
        return self.steps

    @property
    def is_banded(self) -> bool:
        """True if columns end, so that a run may have more steps than planned."""
        return False

    @property
    def memory(self) -> int:
        """The number of tensors of the model's size that the stream keeps."""
        return max(map(len, self.filter)) - 1

    @property
    def draws_again(self) -> bool:
        """True if the stream draws again what it would otherwise keep."""
        return False

    @property
    def can_redraw(self) -> bool:
        """True if a row may be drawn once more after a step that has failed."""
        return True

    @property
    def factor(self) -> float:
        """What multiplies the filter, so that the first column of C has norm 1."""
        return _first_column(self)[1]

    def coefficients(self) -> NDArray:
        """Returns the first column of C ``[steps]``, of L2 norm 1."""
        return _first_column(self)[0]

    def inverse_coefficients(self) -> NDArray:
        """Returns the first column of ``C^-1`` ``[steps]``."""
        impulse = np.zeros(self.steps)
        impulse[0] = self.factor
        return lfilter(*self.filter, impulse)

    def sensitivity(self, participation: Participation) -> float:
        """
        Returns the most that one record changes ``C G``, in L2 norm, if its clipped
        gradient has a norm of at most 1 in each of its steps.

        It is exact if columns have no row in common, and if the first column is
        non-negative and does not rise; otherwise, as may be for an ``InverseBanded``
        that was searched for, it is a bound (McMahan et al. 2024, theorem 2 of arXiv
        2405.13763).

        Example:
            >>> from opacus_ext.strategies import LambdaCGD
            >>> noise = LambdaCGD(steps=100, correlation=0.5)
            >>> f"{noise.sensitivity(Participation(separation=10, times=4)):.3f}"
            '2.001'
        """
        separation = min(participation.separation, self.steps)
        times = min(participation.times, -(-self.steps // separation))
        c = self.coefficients()
        if times == 1:
            return 1.0
        if self.span <= separation:
            squares = np.cumsum(c * c)
            lengths = self.steps - separation * np.arange(times)
            return math.sqrt(float(squares[lengths - 1].sum()))
        return lagged_norm(c, separation, times)

    def prefix_error(self) -> float:
        """
        Returns the root mean square, over the steps, of the noise in the weights, for a
        learning rate of 1 and ``Z`` of std 1: ``||A C^-1||_F / sqrt(n)``.

        ``A`` has the sums of all gradients so far, each with weight 1; with momentum
        ``1 + momentum + ... + momentum^k`` after k further steps (Kalinin and Lampert
        2024, "Banded square root matrix factorization for differentially private model
        training").

        Example:
            >>> from opacus_ext.strategies import Banded
            >>> f"{Banded(bands=1, steps=100).prefix_error():.3f}"
            '7.106'
        """
        return math.sqrt(float(np.mean(self.errors() ** 2)))

    def last_error(self) -> float:
        """Returns the standard deviation of the noise in the last step's weights."""
        return float(self.errors()[-1])

    def errors(self) -> NDArray:
        """Returns the same after each step ``[steps]``."""
        left = lfilter(*self.filter, sums(self.steps, self.momentum))
        return np.sqrt(np.cumsum((self.factor * left) ** 2))

    def row(self, past: Any, z: Any, step: int) -> Any:
        """
        Returns this step's row of ``C^-1 Z``, of the shape of ``z``, and updates
        ``past``. For the sake of time and memory ``z`` is overwritten.

        Args:
            past: tensor ``[memory, ...]``, zeros before the first step; or the last
                row of ``Z``, if the stream draws it again
            z: tensor, this step's row of ``Z``
            step: number of the step, from 0
        """
        numerator, denominator = self.filter
        # A ring of the last rows of Z over the denominator.
        inner = z.contiguous()
        if len(denominator) > 1:
            add_combined(inner, past, _in_ring(denominator, len(past), step), -1)
        row = inner
        if len(numerator) > 1:
            row = inner.clone()
            add_combined(row, past, _in_ring(numerator, len(past), step))
        if len(past):
            past[step % len(past)] = inner
        return row.mul_(self.factor)


def add_combined(
    total: Any, tensors: Any, weights: Sequence[float], sign: int = 1
) -> None:
    """Adds the weighted sum of tensors ``[k, ...]``, times a sign, in place."""
    matrix = tensors.view(len(tensors), -1).t()
    total.view(-1).addmv_(matrix, tensors.new_tensor(weights), alpha=sign)


def _in_ring(weights: Sequence[float], size: int, step: int) -> List[float]:
    """Returns the weights of steps before, in the order of a ring of their rows."""
    ring = [0.0] * size
    for i, weight in enumerate(weights[1:]):
        ring[(step - 1 - i) % size] = weight
    return ring


@lru_cache(maxsize=64)
def _first_column(strategy: Strategy) -> Tuple[NDArray, float]:
    """Returns the first column of C, of norm 1, and its norm before."""
    numerator, denominator = strategy.filter
    impulse = np.zeros(strategy.steps)
    impulse[0] = 1.0
    c = lfilter(denominator, numerator, impulse)
    norm = float(np.sqrt(c @ c))
    c = c / norm
    c.setflags(write=False)
    return c, norm


def lagged_norm(c: NDArray, separation: int, times: int) -> float:
    """
    Returns the norm of the sum of so many columns of a Toeplitz matrix, each so many
    steps after the one before, for a first column that is made to be non-negative and
    not to rise: no sum of columns that are further apart, or fewer, has a larger one.
    """
    steps = len(c)
    c = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    padded = np.pad(c, (0, -steps % separation)).reshape(-1, separation)
    total = np.cumsum(padded, axis=0)
    total[times:] -= total[:-times].copy()
    total = total.ravel()[:steps]
    return float(np.sqrt(total @ total))


def sums(steps: int, momentum: float) -> NDArray:
    """The first column of A: what a gradient adds to the weights of later steps."""
    return lfilter([1.0], [1.0, -momentum], np.ones(steps))


def least(
    strategy_of: Callable[[NDArray], Filter],
    start: NDArray,
    steps: int,
    momentum: float,
    separation: Optional[int],
) -> Tuple[NDArray, float]:
    """
    Returns the numbers for which a filter leaves the least noise in the weights, over
    the steps of a run, times the sensitivity; and the log of its square.

    Args:
        strategy_of: the filter of some numbers
        start: the numbers at which the search begins
        steps: of the run
        momentum: of the optimizer
        separation: least steps between two of a record; None if it has one step only
    """
    column, impulse = sums(steps, momentum), np.zeros(steps)
    impulse[0] = 1.0
    apart = separation or steps
    times = -(-steps // apart)

    def objective(numbers: NDArray) -> float:
        """The log of the squared error."""
        numerator, denominator = strategy_of(numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            left = lfilter(numerator, denominator, column)
            c = lfilter(denominator, numerator, impulse)
            error = np.mean(np.cumsum(left * left)) * lagged_norm(c, apart, times) ** 2
        return math.log(error) if 0 < error < 1e100 else 250.0

    best = start
    for _ in range(3):  # a search by differences ends early where they are rough
        found = minimize(objective, best, method="BFGS", options={"gtol": 1e-7})
        gained = objective(best) - found.fun
        best = found.x if gained > 0 else best
        if gained < 1e-9:
            break
    return best, objective(best)


def check_whole(name: str, value: Any, most: float = math.inf) -> None:
    """Refuses what is no whole number from 1 on."""
    if not (isinstance(value, Integral) and 1 <= int(value) <= most):
        up_to = "" if most == math.inf else f" to {most:g}"
        raise Refused(
            f"{name}={value!r}.",
            parameter=name,
            remedy=f"Give a whole number from 1{up_to}.",
        )
