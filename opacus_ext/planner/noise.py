"""The noise of a budget, of single configurations and of whole grids of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Tuple

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

_WORK = 1.5 * 2.0**27  # of a grid: 4 seconds, where most take a fifth of it


def batches_per_epoch(budget: Budget, batch: Any) -> np.ndarray:
    """Returns the whole batches of an epoch; the other records stay out of it."""
    return np.floor(budget.examples / np.asarray(batch, dtype=float) * (1 + 1e-12))


def noise_of(budget: Budget, batch: Any, steps: Any) -> calibration.Calibration:
    """Returns the calibrated noise of each configuration; batch and steps broadcast."""
    how = budget.amplification
    batch, steps = np.asarray(batch, dtype=float), np.asarray(steps, dtype=float)
    privacy, records = (budget.epsilon, budget.delta), records_of(budget)
    poisson: Any = np.inf
    if how != "none":
        rate = batch / budget.examples
        poisson = calibration.noise_multiplier(*privacy, steps, rate, records)
    fixed: Any = np.inf
    if how != "poisson":
        times = np.maximum(np.ceil(steps / batches_per_epoch(budget, batch)), 1)
        one = calibration.noise_multiplier(*privacy, 1, 1.0)
        fixed = records * np.sqrt(times) * one
    # A delta above the probability of ever being sampled needs no noise at all. That is
    # not private in any useful sense.
    amplified = (poisson <= fixed) & ((poisson > 0) | (how == "poisson"))
    return calibration.lower_noise(poisson, fixed, amplified, batch)


def records_of(budget: Budget) -> int:
    """Returns the number of records of a user that are drawn independently."""
    return budget.records_per_user if budget.sampling == "records" else 1


def noise_grid(
    budget: Budget, batch: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns noise multiplier, ratio and True for Poisson samples, ``[B, T]`` each."""
    # Noise is calibrated where the rate is a power of two and the steps one of four.
    # Its ratio to the central limit is interpolated, to 1 % at worst, mostly 0.1 %. A
    # plan's own noise is calibrated again.
    key = Budget(
        users=budget.users,
        epsilon=budget.epsilon,
        delta=budget.delta,
        records_per_user=budget.records_per_user,
        sampling=budget.sampling,
        amplification=budget.amplification,
    )
    return _cached_grid(key, tuple(batch), tuple(steps))


@lru_cache(maxsize=32)
def _cached_grid(
    budget: Budget, batch: Tuple[float, ...], steps: Tuple[float, ...]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    b, t = np.array(batch), np.array(steps)
    fixed = replace(budget, amplification="none")
    noise = noise_of(fixed, b[:, None], t).noise_multiplier
    amplified = np.zeros(noise.shape, dtype=bool)
    if budget.amplification != "none":
        parts = budget.examples / b
        kp, kt = _knots(parts, 2), _knots(t, 4)
        axes = (parts, kp), (t, kt)
        calibrated = _calibrated(budget, kp, kt)
        limit = _central_limit(budget, kp, kt)
        off = np.log(np.where(calibrated > 0, calibrated, limit) / limit)
        for axis, (wanted, knots) in enumerate(axes):
            degree = min(3, len(knots) - 1)
            if degree == 0:
                off = np.repeat(off, len(wanted), axis=axis)
                continue
            spline = make_interp_spline(np.log(knots), off, degree, axis=axis)
            off = spline(np.log(wanted))
        poisson = np.exp(off) * _central_limit(budget, parts, t)
        ever = -np.expm1(t * np.log1p(-1 / np.maximum(parts, 1 + 1e-12)[:, None]))
        poisson = np.where(ever > budget.delta, poisson, np.inf)  # see noise_of
        amplified = (poisson <= noise) | (budget.amplification == "poisson")
        noise = np.where(amplified, poisson, noise)
    return noise, noise / b[:, None], amplified


def _knots(values: np.ndarray, base: int) -> np.ndarray:
    """Returns the powers of a base around a range: the same for every budget."""
    low, high = np.log([values.min(), values.max()]) / math.log(base)
    return base ** np.arange(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1.0)


def _calibrated(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns calibrated noise, ``[parts, T]``; refuses what would take long."""
    privacy = budget.epsilon, budget.delta, records_of(budget)
    with WORK.bounded(_WORK):
        try:
            return np.array([_knot(*privacy, part, tuple(steps)) for part in parts])
        except Refused as error:
            if WORK.left > 0:
                raise
            raise Refused(
                f"A plan for epsilon={budget.epsilon:g}, delta={budget.delta:g} and "
                f"{records_of(budget)} records of a user takes too long to calibrate.",
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


def _central_limit(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns the noise in the central limit, ``[parts, T]``."""
    mu = 1 / calibration.noise_multiplier(budget.epsilon, budget.delta, 1, 1.0)
    return central_limit(mu, 1 / parts[:, None], steps)


@lru_cache(maxsize=1024)
def advantage(
    budget: Budget, noise: float, batch: float, steps: float, amplified: bool
) -> float:
    """Returns the largest advantage of a membership inference."""
    records = records_of(budget)
    if amplified:
        rate = batch / budget.examples
        return float(calibration.delta(noise, rate, steps, 0.0, records))
    # At worst all records of a user are in the same fixed batches.
    times = math.ceil(steps / batches_per_epoch(budget, batch))
    return float(calibration.delta(noise / records, 1.0, times, 0.0))


def verified_noise(
    noise_multiplier: float,
    sampling: Sampling,
    records: int,
    steps: int,
    epsilon: float,
    delta: float,
    most: float = 1.05,
) -> float:
    """Returns the noise, raised by up to ``most`` to the accountant's upper bound."""
    factor, step = 1.0, 1e-3
    while factor <= most:
        accountant = Composition()
        sampling.account(accountant, records, noise_multiplier * factor, int(steps))
        if accountant.get_epsilon(delta) <= epsilon:
            return noise_multiplier * factor
        factor, step = factor + step, 2 * step
    raise Refused(
        f"noise_multiplier={noise_multiplier:g} was calibrated for epsilon={epsilon:g},"
        f" delta={delta:g}, {steps} steps with {sampling} of {records} records; the "
        f"accountant finds more, up to {most} times that noise.",
        parameter="noise_multiplier",
        remedy="Please report it.",
    )
