"""Noise that takes back some of what it added in the steps before.

DP-SGD's weights are sums of noisy gradients, so what matters is the noise of the prefix
sums ``A G``, not that of each gradient. The matrix mechanism (Denisov et al. 2022) adds
``C^-1 Z`` to the gradients ``G``, with independent ``Z``: the sums then have the noise
``A C^-1 Z``, which a good C makes smaller than ``A Z``, at the sensitivity of ``C G``.
Here C is banded and Toeplitz: lower triangular with the same b coefficients in each
column, of L2 norm 1 ("(Amplified) Banded Matrix Factorization", Choquette-Choo et al.
2023; Toeplitz as in McKenna 2024, "Scaling up the Banded Matrix Factorization
Mechanism"). If no record takes part in two of any b steps in a row, the columns of C
that a record meets have no row in common, and each participation is a Gaussian
mechanism of its own with the noise multiplier of ``Z``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Tuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opacus_ext.refused import Refused


@lru_cache(maxsize=256)
def coefficients(bands: int, steps: int) -> Tuple[float, ...]:
    """
    The b coefficients of C that minimise :func:`error`, of L2 norm 1.

    Args:
        bands: b, at least 1, which is independent noise
        steps: of the run, n

    Raises:
        Refused: unless 1 <= bands <= steps

    Example:
        >>> coefficients(1, 100)
        (1.0,)
        >>> [round(c, 3) for c in coefficients(2, 100)]
        [0.725, 0.689]
    """
    if not 1 <= bands <= steps:
        raise Refused(
            f"{bands} bands for {steps} steps.",
            parameter="bands",
            remedy="Give at least one band, and at most one a step.",
        )
    if bands == 1:
        return (1.0,)
    weights = np.sqrt(np.arange(steps, 0, -1) / steps)

    @lru_cache(maxsize=2)
    def residuals(rest: bytes) -> Tuple[NDArray, NDArray]:
        """Weighted diagonals of A C^-1, times the norm of C; and their slopes."""
        c = np.concatenate([[1.0], np.frombuffer(rest)])
        norm = np.sqrt(c @ c)
        d = lfilter([1.0], c, np.ones(steps))
        moved = lfilter([1.0], c, d)
        slopes = np.zeros((steps, bands - 1))
        if not max(abs(d[-1]), abs(moved[-1])) < 1e50:  # C^-1 explodes: not there
            return np.full(steps, 1e50), slopes
        for i in range(1, bands):
            slopes[i:, i - 1] = -norm * moved[: steps - i]
            slopes[:, i - 1] += d * c[i] / norm
        return weights * d * norm, weights[:, None] * slopes

    def objective(rest: NDArray) -> float:
        return float(np.sum(residuals(rest.tobytes())[0] ** 2)) / steps

    def slope(rest: NDArray) -> NDArray:
        r, jacobian = residuals(rest.tobytes())
        return 2 / steps * (r @ jacobian)

    def curvature(rest: NDArray) -> NDArray:
        jacobian = residuals(rest.tobytes())[1]
        return 2 / steps * (jacobian.T @ jacobian)

    # 1 / sqrt(1 - x), the square root of A, which is optimal up to a constant for b = n
    # (Fichtenberger, Henzinger and Upadhyay 2023).
    k = np.arange(1, bands)
    start = np.cumprod((2 * k - 1) / (2 * k))
    found = minimize(
        objective,
        start,
        jac=slope,
        hess=curvature,
        method="trust-exact",
        options={"gtol": 1e-7, "initial_trust_radius": 0.1},
    )
    c = np.concatenate([[1.0], found.x])
    return tuple(map(float, c / np.sqrt(c @ c)))


def error(c: Tuple[float, ...], steps: int) -> float:
    """
    The root mean square, over the steps, of the noise in the sum of all gradients so
    far, for ``Z`` of std 1: ``||A C^-1||_F / sqrt(n)``.

    Args:
        c: the coefficients of C
        steps: of the run, n

    Example:
        >>> f"{error((1.0,), 100):.3f}"
        '7.106'
    """
    d = lfilter([1.0], np.array(c), np.ones(steps))
    return float(np.sqrt((np.arange(steps, 0, -1) / steps) @ d**2))
