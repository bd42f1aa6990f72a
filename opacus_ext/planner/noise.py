"""The noise of a budget, of single configurations and of whole grids of them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional, Tuple

import numpy as np
from scipy.interpolate import make_interp_spline

from opacus_ext.accountants import calibration
from opacus_ext.accountants.composition import Composition
from opacus_ext.accountants.saddle_point import WORK
from opacus_ext.accountants.solver import central_limit
from opacus_ext.planner.budget import Budget
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.data.sampling import Sampling
    from opacus_ext.strategies import Strategy

_WORK = 1.5 * 2.0**27  # of a grid: 4 seconds, where most take a fifth of it


def participations(budget: Budget, batch: Any, steps: Any) -> Any:
    """Returns how often an example is drawn from fixed batches, the whole ones."""
    whole = np.floor(budget.examples / np.asarray(batch, dtype=float) * (1 + 1e-12))
    return np.maximum(np.ceil(steps / whole), 1)


def noise_of(budget: Budget, batch: Any, steps: Any) -> calibration.Calibration:
    """Returns the calibrated noise of each configuration; batch and steps broadcast."""
    how = budget.amplification
    batch, steps = np.asarray(batch, dtype=float), np.asarray(steps, dtype=float)
    poisson: Any = np.inf
    if how != "none":
        poisson = calibration.noise_multiplier(
            budget.epsilon,
            budget.delta,
            steps,
            batch / budget.examples,
            budget.records,
        )
    fixed: Any = np.inf
    if how != "poisson":
        fixed = _fixed_noise(budget, batch, steps)
    # A delta above the probability of ever being sampled needs no noise at all. That is
    # not private in any useful sense.
    amplified = (poisson <= fixed) & ((poisson > 0) | (how == "poisson"))
    return calibration.lower_noise(poisson, fixed, amplified, batch)


def _fixed_noise(budget: Budget, batch: Any, steps: Any) -> Any:
    # At worst all records of a user are in the same batches.
    times = participations(budget, batch, steps)
    return budget.records * np.sqrt(times) * _noise_of_one(budget)


def _noise_of_one(budget: Budget) -> Any:
    """Returns the noise of one step on all records."""
    return calibration.noise_multiplier(budget.epsilon, budget.delta, 1, 1.0)


def noise_grid(
    budget: Budget, batch: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns noise multiplier, ratio and True for Poisson samples, ``[B, T]`` each."""
    fixed = _fixed_noise(budget, batch[:, None], steps)
    poisson = np.full(fixed.shape, np.inf)
    if budget.amplification != "none":
        poisson = _poisson_noise(budget, budget.examples / batch, steps)
    amplified = (poisson <= fixed) | (budget.amplification == "poisson")
    noise = np.where(amplified, poisson, fixed)
    return noise, noise / batch[:, None], amplified


def _poisson_noise(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns the noise of Poisson samples of one in so many, ``[parts, T]``."""
    # Noise is calibrated where the rate is a power of two and the steps one of four.
    # Its ratio to the central limit is interpolated, to 1 % at worst, mostly 0.1 %. A
    # plan's own noise is calibrated again.
    knots = _knots(parts, 2), _knots(steps, 4)
    mu = 1 / _noise_of_one(budget)
    noise = _calibrated(budget, *knots)
    limit = central_limit(mu, 1 / knots[0][:, None], knots[1])
    off = np.log(np.where(noise > 0, noise, limit) / limit)
    for axis, (wanted, at) in enumerate(zip((parts, steps), knots)):
        if len(at) == 1:
            off = np.repeat(off, len(wanted), axis=axis)
        else:
            degree = min(3, len(at) - 1)
            spline = make_interp_spline(np.log(at), off, degree, axis=axis)
            off = spline(np.log(wanted))
    noise = np.exp(off) * central_limit(mu, 1 / parts[:, None], steps)
    drawn = -np.expm1(steps * np.log1p(-1 / np.maximum(parts, 1 + 1e-12)[:, None]))
    return np.where(drawn > budget.delta, noise, np.inf)  # see noise_of


def _knots(values: np.ndarray, base: int) -> np.ndarray:
    """Returns the powers of a base around a range: the same for every budget."""
    low, high = np.log([values.min(), values.max()]) / math.log(base)
    return base ** np.arange(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1.0)


def _calibrated(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns calibrated noise, ``[parts, T]``; refuses what would take long."""
    privacy = budget.epsilon, budget.delta, budget.records
    with WORK.bounded(_WORK):
        try:
            return np.array([_knot(*privacy, part, tuple(steps)) for part in parts])
        except Refused as error:
            if WORK.left > 0:
                raise
            raise Refused(
                f"A plan for epsilon={budget.epsilon:g}, delta={budget.delta:g} and "
                f"{budget.records} records of a user takes too long to calibrate.",
                parameter="batch_size",
                remedy="Bound batch_size and steps, or take a larger delta.",
            ) from error


@lru_cache(maxsize=1024)
def _knot(
    epsilon: float, delta: float, records: int, part: float, steps: Tuple[float, ...]
) -> np.ndarray:
    """Returns the noise at one rate after each number of steps."""
    return np.asarray(
        calibration.noise_multiplier(
            epsilon, delta, steps, 1 / part, records, rough=True
        )
    )


@lru_cache(maxsize=1024)
def advantage(
    budget: Budget, noise: float, batch: float, steps: float, amplified: bool
) -> float:
    """Returns the largest advantage of a membership inference."""
    rate, times, records = batch / budget.examples, steps, budget.records
    if not amplified:
        rate, times = 1.0, float(participations(budget, batch, steps))
        noise, records = noise / records, 1
    return float(calibration.delta(noise, rate, times, 0.0, records))


def six_digits(noise: float) -> float:
    """Rounded up, so that the noise that is printed is enough."""
    digits = 5 - math.floor(math.log10(noise)) if noise > 0 else 0
    rounded = round(noise, digits)
    return rounded if rounded >= noise else round(noise + 10.0**-digits, digits)


def verified_noise(
    noise_multiplier: float,
    sampling: Sampling,
    records: int,
    steps: int,
    epsilon: float,
    delta: float,
    most: float = 1.05,
    strategy: Optional[Strategy] = None,
) -> float:
    """
    Returns the noise, raised by up to ``most`` to the accountant's upper bound.
    ``strategy`` is that of correlated noise.
    """
    factor, step = 1.0, 1e-3
    while factor <= most:
        accountant = Composition()
        noise = noise_multiplier * factor
        sampling.account(accountant, records, noise, int(steps), strategy)
        if accountant.get_epsilon(delta) <= epsilon:
            return noise
        factor, step = factor + step, 2 * step
    raise Refused(
        f"noise_multiplier={noise_multiplier:g} was calibrated for epsilon={epsilon:g},"
        f" delta={delta:g}, {steps} steps with {sampling} of {records} records; the "
        f"accountant finds more, up to {most} times that noise.",
        parameter="noise_multiplier",
        remedy="Please report it.",
    )
