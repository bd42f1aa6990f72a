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

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from numbers import Integral
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    List,
    Mapping,
    Optional,
    Tuple,
)

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opacus_ext.refused import Refused

_ENTRIES = 2**25  # of a Jacobian at most, 256 MiB


@lru_cache(maxsize=256)
def coefficients(bands: int, steps: int, momentum: float = 0.0) -> Tuple[float, ...]:
    """
    The b coefficients of C that minimize :func:`error`, of L2 norm 1.

    Time and memory grow with b, and hardly with n: only the steps until a gradient's
    effect on the weights is constant are computed one by one.

    Args:
        bands: b, at least 1, which is independent noise
        steps: number of steps of the run, n
        momentum: momentum of SGD, from 0 to below 1

    Raises:
        Refused: unless 1 <= bands <= steps, whole numbers, and 0 <= momentum < 1; if it
            would take more than 256 MiB

    Example:
        >>> coefficients(1, 100)
        (1.0,)
        >>> [round(c, 3) for c in coefficients(2, 100)]
        [0.796, 0.606]
        >>> [round(c, 3) for c in coefficients(2, 1_000_000, momentum=0.9)]
        [0.708, 0.706]
    """
    whole = isinstance(bands, Integral) and isinstance(steps, Integral)
    if not (whole and 1 <= bands <= steps and 0 <= momentum < 1):
        raise Refused(
            f"{bands} bands for {steps} steps, with a momentum of {momentum:g}.",
            parameter="bands",
            remedy="Give whole numbers, at least one band and at most one a step, and "
            "the optimizer's momentum, from 0 to below 1.",
        )
    if bands == 1:
        return (1.0,)
    head = min(steps, max(bands, 2**20 // bands))
    while head * bands <= _ENTRIES:
        c, expected = _fit(bands, steps, momentum, head)
        if math.isclose(error(c, steps, momentum), expected, rel_tol=1e-6):
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
    column = _sums(head, momentum)
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


def _sums(steps: int, momentum: float) -> NDArray:
    """The first column of A: what a gradient adds to the weights of later steps."""
    return lfilter([1.0], [1.0, -momentum], np.ones(steps))


def error(c: Tuple[float, ...], steps: int, momentum: float = 0.0) -> float:
    """
    The root mean square, over the steps, of the noise in the weights, for a learning
    rate of 1 and ``Z`` of std 1: ``||A C^-1||_F / sqrt(n)``.

    ``A`` has the sums of all gradients so far, each with weight 1; with momentum
    ``1 + momentum + ... + momentum^k`` after k further steps (Kalinin and Lampert
    2024, "Banded square root matrix factorization for differentially private model
    training").

    Args:
        c: the coefficients of C
        steps: of the run, n
        momentum: of SGD

    Example:
        >>> f"{error((1.0,), 100):.3f}"
        '7.106'
    """
    d = lfilter([1.0], np.array(c), _sums(steps, momentum))
    return float(np.sqrt((np.arange(steps, 0, -1) / steps) @ d**2))


@dataclass(frozen=True)
class Banded:
    """
    Correlated noise for ``make_private(noise=...)``: the noise of each step takes back
    some of the noise of the ``bands - 1`` steps before. Batches are drawn by
    :class:`opacus_ext.data.CyclicPoisson`. :func:`choose_bands` finds the best number.

    Args:
        bands: b; the more, the less noise is left in the weights, but each record is
            drawn with b times the rate from 1/b of the data set. The optimizer keeps
            b - 1 times the model's size
        steps: of the run
        momentum: of SGD, or the first of Adam's betas: the noise is chosen to leave
            the least in weights that such steps have moved. Privacy does not depend
            on it

    Example:
        >>> noise = Banded(bands=4, steps=1000)
        >>> alone = error(coefficients(1, 1000), 1000)
        >>> f"{error(coefficients(noise.bands, noise.steps), 1000) / alone:.2f}"
        '0.51'
    """

    bands: int
    steps: int
    momentum: float = 0.0


def choose_bands(
    noise_multiplier: Callable[[List[int], List[float]], Iterable[float]],
    rate: float,
    steps: int,
    momentum: float = 0.0,
) -> Banded:
    """
    The best of 1, 2, 4, ... 64 bands, by the noise multiplier that the budget asks for,
    times :func:`error`. More bands cancel more noise, but gain less privacy from
    sampling; the search ends at the first that is worse.

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
        left = noise * error(coefficients(bands, steps, momentum), steps, momentum)
        if left >= best[0]:
            break
        best = (left, Banded(bands, steps, momentum))
    return best[1]


class BandedNoise:
    """
    The rows of ``C^-1 Z``, one a step, from those of ``Z``.

    ``xi_t = (z_t - sum over 0 < i < b of c_i xi_(t - i)) / c_0``: the last b - 1 rows
    are kept, that many times the size of the model in float32.

    Of several processes, that which adds the noise of a parameter keeps its rows.

    Args:
        plan: 1 band gives Z itself. The run may take less or more steps than planned,
            which is as private and not quite as good
    """

    def __init__(self, plan: Banded):
        self.coefficients = coefficients(plan.bands, plan.steps, plan.momentum)
        self.plan, self.bands = plan, plan.bands
        self.taken = 0  # steps
        self.counted = 0  # rounds of as many steps as bands, by the accountant
        self.noise_multiplier: Optional[float] = None  # of the run, from its first step
        self.trained: Optional[List[int]] = None  # the same
        self._past: Dict[Hashable, torch.Tensor] = {}  # [b - 1, ...], a ring

    def __call__(self, name: Hashable, z: torch.Tensor) -> torch.Tensor:
        """
        The row for some parameters at this step.

        Args:
            name: of the parameters
            z: independent noise of std 1

        Returns:
            Noise of the shape of ``z``, in float32 or wider.

        Raises:
            Refused: if the rows of the steps before are missing
        """
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        c0, *rest = self.coefficients
        if not rest:
            return z / c0
        past = self._past.get(name)
        if past is None:
            if self.taken:
                raise Refused(
                    f"There is no noise of {self.taken} steps before to take back: the "
                    "checkpoint is of a process that did not add it.",
                    parameter="noise",
                    remedy="Load that of process 0, or with experts spread over "
                    "processes that of each its own.",
                )
            past = self._past[name] = z.new_zeros(len(rest), *z.shape)
        ring = [rest[(self.taken - 1 - i) % len(rest)] for i in range(len(rest))]
        row = (z - torch.tensordot(past.new_tensor(ring), past, 1)) / c0
        past[self.taken % len(rest)] = row
        return row

    def begin(self, noise_multiplier: float, trained: List[int]) -> None:
        """
        Checks that a step adds the noise of the run's first step.

        Args:
            noise_multiplier: of the step
            trained: the places of the parameters with gradients

        Raises:
            Refused: if they are others than at the first step
        """
        known = self.noise_multiplier
        if known is not None and known != noise_multiplier:
            raise Refused(
                f"The noise multiplier has changed from {known:g} to "
                f"{noise_multiplier:g}, which correlated noise is not accounted for.",
                parameter="noise",
                remedy='Keep it, or train with noise="independent".',
            )
        if self.trained not in (None, trained):
            raise Refused(
                "Other parameters are trained than at the first step, and correlated "
                "noise would take back what was added to those.",
                parameter="noise",
                remedy="Freeze and unfreeze before make_private, or train with "
                'noise="independent".',
            )
        self.noise_multiplier, self.trained = noise_multiplier, trained

    @property
    def std(self) -> float:
        """Standard deviation of the last step's row, for ``Z`` of std 1."""
        impulse = np.zeros(max(self.taken, 1))
        impulse[0] = 1
        inverse = lfilter([1.0], np.array(self.coefficients), impulse)
        return float(np.sqrt(inverse @ inverse))

    def state_dict(self) -> Dict[str, Any]:
        """To go on with; whoever has it can take noise off the gradients."""
        names = ("taken", "counted", "noise_multiplier", "trained")
        kept = {name: getattr(self, name) for name in names}
        return {"plan": asdict(self.plan), **kept, "past": self._past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            Refused: for that of a run with another plan
        """
        if Banded(**state["plan"]) != self.plan:
            raise Refused(
                f"The checkpoint has noise of {Banded(**state['plan'])}, and the run "
                f"has {self.plan}.",
                parameter="noise",
                remedy="Go on with what the run began with.",
            )
        self.taken, self.noise_multiplier = state["taken"], state["noise_multiplier"]
        self.trained, self.counted = state["trained"], state["counted"]
        self._past = {name: x.clone() for name, x in state["past"].items()}
