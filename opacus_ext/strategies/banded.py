"""Noise that takes back some of what it added in a few steps before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Iterable, List, Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opacus_ext.refused import Refused
from opacus_ext.strategies.strategy import Filter, Strategy, check_whole, sums

_ENTRIES = 2**25  # of a Jacobian at most, 256 MiB


@lru_cache(maxsize=256)
def coefficients(bands: int, steps: int, momentum: float = 0.0) -> Tuple[float, ...]:
    """
    The b coefficients of C, of L2 norm 1, that leave the least noise in the weights
    (``prefix_error``).

    Time and memory grow with b, and hardly with n: only the steps until a gradient's
    effect on the weights is constant are computed one by one.

    Args:
        bands: b, at least 1, which is independent noise
        steps: number of steps of the run, n
        momentum: momentum of SGD, from 0 to below 1

    Raises:
        Refused: if it would take more than 256 MiB

    Example:
        >>> coefficients(1, 100)
        (1.0,)
        >>> [round(c, 3) for c in coefficients(2, 100)]
        [0.796, 0.606]
        >>> [round(c, 3) for c in coefficients(2, 1_000_000, momentum=0.9)]
        [0.708, 0.706]
    """
    if bands == 1:
        return (1.0,)
    head = min(steps, max(bands, 2**20 // bands))
    while head * bands <= _ENTRIES:
        c, expected = _fit(bands, steps, momentum, head)
        if math.isclose(_error(c, steps, momentum), expected, rel_tol=1e-6):
            return c
        head = min(steps, 4 * head)  # it had not settled
    raise Refused(
        f"{bands} bands for {steps} steps would take {8 * head * bands >> 20} MiB to "
        "find their coefficients.",
        parameter="bands",
        remedy="Give fewer bands: the optimizer keeps one less times the model's size.",
    )


def _fit(
    bands: int, steps: int, momentum: float, head: int
) -> Tuple[Tuple[float, ...], float]:
    """
    Coefficients, and their error if the columns of A C^-1 are constant after ``head``
    steps, which the caller checks.
    """
    column = sums(head, momentum)
    limit = 1 / (1 - momentum)
    rest = steps - head
    weights = np.append(np.arange(steps, rest, -1.0), rest * (rest + 1) / 2) / steps

    @lru_cache(maxsize=2)
    def residuals(rest: bytes) -> Tuple[NDArray, NDArray]:
        """Weighted diagonals of A C^-1, times the norm of C; and their slopes."""
        c = np.concatenate([[1.0], np.frombuffer(rest)])
        norm, total = np.sqrt(c @ c), c.sum()
        d = lfilter([1.0], c, column)
        moved = lfilter([1.0], c, d)
        slopes = np.zeros((bands - 1, head + 1))
        if not max(abs(d[-1]), abs(moved[-1])) < 1e50:  # C^-1 explodes: not there
            return np.full(head + 1, 1e50), slopes
        d = np.append(d, limit / total)
        for i, row in enumerate(slopes, 1):
            row[i:-1] = -norm * moved[: head - i]
            row[-1] = -norm * limit / total**2
            row += d * (c[i] / norm)
        slopes *= scale
        return scale * d * norm, slopes

    # 1 / sqrt(1 - x), the square root of A, which is optimal up to a constant for b = n
    # (Fichtenberger, Henzinger and Upadhyay 2023).
    k = np.arange(1, bands)
    start = np.cumprod((2 * k - 1) / (2 * k))
    scale = np.sqrt(weights)
    first = np.linalg.norm(residuals(start.tobytes())[0])
    scale = scale / first  # so that the least slope means the same in long runs
    residuals.cache_clear()

    def objective(rest: NDArray) -> float:
        """The squared error."""
        return float(np.sum(residuals(rest.tobytes())[0] ** 2))

    def slope(rest: NDArray) -> NDArray:
        """Its gradient."""
        r, jacobian = residuals(rest.tobytes())
        return 2 * (jacobian @ r)

    def curvature(rest: NDArray) -> NDArray:
        """The Gauss-Newton matrix."""
        jacobian = residuals(rest.tobytes())[1]
        return 2 * (jacobian @ jacobian.T)

    solution = minimize(
        objective,
        start,
        jac=slope,
        hess=curvature,
        method="trust-exact",
        options={"gtol": 1e-7, "initial_trust_radius": 0.1},
    )
    c = np.concatenate([[1.0], solution.x])
    return tuple(map(float, c / np.sqrt(c @ c))), float(first * np.sqrt(solution.fun))


def _error(c: Tuple[float, ...], steps: int, momentum: float) -> float:
    """Returns the root mean square, over the steps, of the noise in the weights."""
    d = lfilter([1.0], np.array(c), sums(steps, momentum))
    return float(np.sqrt((np.arange(steps, 0, -1) / steps) @ d**2))


@dataclass(frozen=True)
class Banded(Strategy):
    """
    Banded C: lower triangular, Toeplitz, with the same b coefficients in each column
    ("(Amplified) Banded Matrix Factorization", Choquette-Choo et al. 2023; Toeplitz as
    in McKenna 2024, "Scaling up the Banded Matrix Factorization Mechanism").

    If no record takes part in two of any b steps in a row, the columns of C that a
    record meets have no row in common, and each participation is a Gaussian mechanism
    of its own with the noise multiplier of ``Z``. Batches are drawn by
    :class:`opacus_ext.data.CyclicPoisson`. :func:`choose_bands` finds the best number.

    Args:
        bands: b; the more, the less noise is left in the weights, but each record is
            drawn with b times the rate from 1/b of the data set. The optimizer keeps
            b - 1 times the model's size

    Example:
        >>> noise, alone = Banded(bands=4, steps=1000), Banded(bands=1, steps=1000)
        >>> f"{noise.prefix_error() / alone.prefix_error():.2f}"
        '0.51'
    """

    bands: int
    steps: int
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bands", self.bands, self.steps)

    @property
    def span(self) -> int:
        """The number of bands."""
        return self.bands

    @property
    def is_banded(self) -> bool:
        """True."""
        return True

    @property
    def filter(self) -> Filter:
        """One over the polynomial of the coefficients."""
        c = coefficients(self.bands, self.steps, self.momentum)
        return Filter((1.0,), tuple(x / c[0] for x in c))


def choose_bands(
    noise_multiplier: Callable[[List[int], List[float]], Iterable[float]],
    rate: float,
    steps: int,
    momentum: float = 0.0,
) -> Banded:
    """
    The best of 1, 2, 4, ... 64 bands, by the noise multiplier that the budget asks for,
    times the noise that is left. More bands cancel more noise, but gain less privacy
    from sampling; the search ends at the first that is worse.

    Args:
        noise_multiplier: those of runs of so many steps, with such rates of sampling
        rate: probability of Poisson sampling of the same run with independent noise
        steps: of the run
        momentum: of SGD, or the first of Adam's betas

    Example:
        >>> choose_bands(lambda steps, rates: [1.0, 1.1, 1.3, 2.5], 0.1, 100)
        Banded(bands=4, steps=100, momentum=0.0)
    """
    counts = [2**k for k in range(7) if 2**k <= steps and 2**k * rate <= 1]
    noises = noise_multiplier(
        [-(-steps // b) for b in counts], [b * rate for b in counts]
    )
    best = (math.inf, Banded(1, steps, momentum))
    for bands, noise in zip(counts, noises):
        strategy = Banded(bands, steps, momentum)
        left = noise * strategy.prefix_error()
        if left >= best[0]:
            break
        best = (left, strategy)
    return best[1]
