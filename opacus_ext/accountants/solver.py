"""Solvers for noise and delta on grids, and checks of what they find."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_ext.accountants.profiles import gaussian_sensitivity, unsampled_epsilon
from opacus_ext.accountants.saddle_point import (
    WORK,
    SampledGaussian,
    TooHardError,
    log_delta_of_steps,
    log_profile,
    sampled_ever,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

MARGIN = 5e-5  # of delta, relative, that a calibrated noise leaves unspent
_WORK = 2.0**30  # of a cell: 10 seconds, where most take a thousandth of it
_BOUNDS: Dict[str, Callable[[NDArray, float], NDArray]] = {
    "above": np.greater,
    "at_least": np.greater_equal,
    "below": np.less,
    "at_most": np.less_equal,
}


def central_limit(mu: ArrayLike, sample_rate: ArrayLike, steps: ArrayLike) -> Any:
    """
    Returns the noise of many steps, mu = q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al.,
    "Deep learning with Gaussian differential privacy", 2020).
    """
    return 1 / np.sqrt(np.log1p((np.divide(mu, sample_rate)) ** 2 / steps))


def default_delta(records: float) -> float:
    """
    Returns 1 / records^1.1, rounded down to one digit.

    Example:
        >>> [default_delta(n) for n in (50_000, 1e6)]
        [6e-06, 2e-07]
    """
    checked("records", records, at_least=1)
    delta = min(records**-1.1, 0.1)
    digit = 10.0 ** math.floor(math.log10(delta))
    return float(f"{math.floor(delta / digit) * digit:.0e}")


class NoiseSearch:
    """
    Finds the noise of one cell after another. A search starts at the central limit,
    corrected as for the cell before.
    """

    def __init__(self, rough: bool = False) -> None:
        self.rough = rough
        self.budget: Any = None

    def forget(self) -> None:
        """Drops what the cell before has taught."""
        self.tilt, self.slope, self.off = 1.0, 2.0, 0.0

    def __call__(
        self,
        epsilon: float,
        delta: float,
        records_per_user: float,
        steps: float,
        sample_rate: float,
    ) -> float:
        q, k = sample_rate, int(records_per_user)
        # The tolerance is for the rounding of a rate that equals delta.
        if sampled_ever(q, steps * k) <= delta * (1 + 1e-12):
            return 0.0
        log_target = math.log(delta) + math.log1p(-MARGIN)
        if q == 1 or steps == k == 1:
            alone = float(unsampled_epsilon(epsilon, q))
            mu = gaussian_sensitivity(alone, log_target - math.log(q))
            return k * math.sqrt(steps) / mu
        mu = gaussian_sensitivity(epsilon, math.log(delta))
        limit = math.log(central_limit(mu / k, q, steps))
        if self.budget != (epsilon, delta, k):
            self.forget()
            self.budget = epsilon, delta, k

        def search(fineness: float) -> float:
            if fineness > 1:
                self.forget()

            def excess(log_noise: float) -> float:
                step = SampledGaussian(math.exp(log_noise), q, k)
                try:
                    value, self.tilt = log_delta_of_steps(
                        step, steps, epsilon, self.tilt, fineness
                    )
                except TooHardError as error:
                    if error.rough is None:
                        raise
                    value = error.rough  # it serves on the way
                return math.log(max(-value, 1e-300) / -log_target)

            tolerance = 3e-3 if self.rough else 3e-6
            log_noise, self.slope = root(
                excess, limit + self.off, self.slope, tolerance
            )
            noise = math.exp(log_noise)
            if not self.rough:  # other sums must find that the budget holds
                step = SampledGaussian(noise, q, k)
                spent = log_profile(step, steps, epsilon, self.tilt, 1.2)[0]
                if not -1e-3 < spent - math.log(delta) <= 0:
                    raise TooHardError
            self.off = log_noise - limit
            return noise

        return surely(search)


def root(
    f: Callable[[float], float], x: float, slope: float, tolerance: float
) -> Tuple[float, float]:
    """
    Returns the zero of an increasing function, by secants within a bracket, and its
    slope there.

    Not by ``scipy.optimize.brentq``: ``f`` is an integral, a neighbor's slope makes
    three evaluations enough, and far from the zero ``f`` is only rough.
    """
    low, high, value = -math.inf, math.inf, f(x)
    for _ in range(100):
        low, high = (x, high) if value < 0 else (low, x)
        new = x - min(max(value / slope, -0.7), 0.7)
        if abs(value) < tolerance:  # and less after this step
            return new, slope
        if not low < new < high:
            new = (low + high) / 2
        if new == x:  # only errors of f are left
            break
        new_value = f(new)
        slope = max((new_value - value) / (new - x), slope / 4)  # not 0 on a plateau
        x, value = new, new_value
    raise TooHardError


def surely(attempt: Callable[[float], float]) -> float:
    """Calls ``attempt`` once more with finer sums if the first result fails."""
    with suppress(TooHardError):
        return attempt(1.0)
    return attempt(1.4)


def on_cells(solve: Callable[..., float], **columns: NDArray) -> Any:
    """Calls ``solve`` for each distinct row of the broadcast columns, in order."""
    broadcast = np.broadcast_arrays(*columns.values())
    rows = np.stack([column.ravel() for column in broadcast], axis=1)
    rows, inverse = np.unique(rows, axis=0, return_inverse=True)
    values: List[float] = []
    for row in progress(rows, "calibrating noise", show=len(rows) > 1):
        cell = dict(zip(columns, row.tolist()))
        try:
            with WORK.bounded(_WORK):
                values.append(solve(**cell))
        except TooHardError:
            told = ", ".join(f"{name} = {x:g}" for name, x in cell.items())
            raise Refused(
                f"{told}: too extreme for an answer that is certain to a part in "
                "10,000, in seconds.",
                remedy="Take a less extreme epsilon, delta, rate or number of steps.",
            ) from None
    return plain(np.array(values)[inverse.ravel()].reshape(broadcast[0].shape))


def plain(values: NDArray) -> Any:
    """Returns a number for an array without axes, and other arrays as they are."""
    return np.asarray(values).item() if np.ndim(values) == 0 else values


def checked(
    name: str, value: ArrayLike, *, whole: bool = False, **bounds: float
) -> NDArray:
    """
    Returns ``value`` as float64; refuses what is not finite, or out of its range.

    Args:
        whole: True for whole numbers only
        **bounds: any of ``above``, ``at_least``, ``below`` and ``at_most``
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise Refused(
            f"{name} must be numbers, not {value!r}.", parameter=name
        ) from None
    if not array.size:
        raise Refused(
            f"{name} is empty.", parameter=name, remedy="Pass a number or more."
        )
    good = np.isfinite(array)
    if whole:
        good &= array == np.floor(array)
    wanted = ["whole" if whole else "finite"]
    for kind, bound in bounds.items():
        good &= _BOUNDS[kind](array, bound)
        wanted.append(f"{kind.replace('_', ' ')} {bound:g}")
    if not good.all():
        raise Refused(
            f"{name} must be {' and '.join(wanted)}, not {array[~good].flat[0]:g}.",
            parameter=name,
        )
    return array
