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

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Dict, Hashable, Mapping, Optional, Tuple

import numpy as np
import torch
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
        [0.796, 0.606]
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


@dataclass(frozen=True)
class Banded:
    """
    Correlated noise for ``make_private(noise=...)``: that of each step takes back some
    of that of the ``bands - 1`` steps before. Batches are drawn by
    :class:`opacus_ext.data.CyclicPoisson`. ``choose_bands`` finds the best for a run.

    Args:
        bands: b; the more, the less noise is left in the weights, but each record is
            drawn with b times the rate from 1/b of the data set. The optimizer keeps
            b - 1 times the model's size
        steps: of the run
    """

    bands: int
    steps: int


class BandedNoise:
    """
    The rows of ``C^-1 Z``, one a step, from those of ``Z``.

    ``xi_t = (z_t - sum over 0 < i < b of c_i xi_(t - i)) / c_0``: the last b - 1 rows
    are kept, that many times the size of the model in float32.

    Args:
        bands: b; 1 gives Z itself
        steps: of the run, for which the coefficients are chosen. It may take less or
            more steps; both are as private, and not quite as good
    """

    def __init__(self, bands: int, steps: int):
        self.coefficients = coefficients(bands, steps)
        self.bands, self.planned_steps = bands, steps
        self.taken = 0  # steps
        self.noise_multiplier: Optional[float] = None  # of the run, from its first step
        self._past: Dict[Hashable, torch.Tensor] = {}  # [b - 1, ...], a ring

    def __call__(self, name: Hashable, z: torch.Tensor) -> torch.Tensor:
        """
        The row for some parameters at this step.

        Args:
            name: of the parameters
            z: independent noise of std 1

        Returns:
            Noise of the shape of ``z``, in float32 or wider.
        """
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        c0, *rest = self.coefficients
        if not rest:
            return z / c0
        past = self._past.get(name)
        if past is None:
            past = self._past[name] = z.new_zeros(len(rest), *z.shape)
        ring = [rest[(self.taken - 1 - i) % len(rest)] for i in range(len(rest))]
        row = (z - torch.tensordot(past.new_tensor(ring), past, 1)) / c0
        past[self.taken % len(rest)] = row
        return row

    def begin(self, noise_multiplier: float) -> None:
        """
        Of a step.

        Raises:
            Refused: if the noise multiplier is another than at the first step
        """
        known = self.noise_multiplier
        if known is not None and known != noise_multiplier:
            raise Refused(
                f"The noise multiplier has changed from {known:g} to "
                f"{noise_multiplier:g}, which correlated noise is not accounted for.",
                parameter="noise",
                remedy='Keep it, or train with noise="independent".',
            )
        self.noise_multiplier = noise_multiplier

    @property
    def std(self) -> float:
        """Of the row of the last step, for ``Z`` of std 1."""
        impulse = np.zeros(max(self.taken, 1))
        impulse[0] = 1
        inverse = lfilter([1.0], np.array(self.coefficients), impulse)
        return float(np.sqrt(inverse @ inverse))

    def state_dict(self) -> Dict[str, Any]:
        """To go on with; whoever has it can take noise off the gradients."""
        names = ("bands", "planned_steps", "taken", "noise_multiplier")
        return {**{name: getattr(self, name) for name in names}, "past": self._past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            Refused: for that of a run with other bands or steps
        """
        theirs, mine = (
            (state["bands"], state["planned_steps"]),
            (self.bands, self.planned_steps),
        )
        if theirs != mine:
            raise Refused(
                f"The checkpoint has noise of {theirs[0]} bands for {theirs[1]} steps, "
                f"and the run has {mine[0]} for {mine[1]}.",
                parameter="noise",
                remedy="Go on with what the run began with.",
            )
        self.taken, self.noise_multiplier = state["taken"], state["noise_multiplier"]
        self._past = {name: x.clone() for name, x in state["past"].items()}
