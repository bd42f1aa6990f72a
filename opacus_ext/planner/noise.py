"""The noise of a budget, of single configurations and of whole grids of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Optional, Tuple

import numpy as np
from scipy.interpolate import make_interp_spline

from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.planner import calibration
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.solver import central_limit
from opacus_ext.refused import Refused


def batches_per_epoch(budget: Budget, batch: Any) -> np.ndarray:
    """
    Batches of an epoch. Opacus samples at rates of 1 / whole number: so many whole
    batches are made of the examples, and what is over stays out. More users then never
    mean more noise.
    """
    return np.floor(budget.examples / np.asarray(batch, dtype=float) * (1 + 1e-12))


def noise_of(
    budget: Budget, batch: Any, steps: Any, amplification: Optional[str] = None
) -> calibration.Calibration:
    """
    The noise of configurations, calibrated for each; batch and steps broadcast.

    Args:
        batch: examples a step
        steps: T
        amplification: in the place of the budget's
    """
    how = amplification or budget.amplification
    users = batch * batches_per_epoch(budget, batch)
    if budget.sampling == "records":
        users = users / budget.records_per_user

    def calibrate(amplification: str) -> calibration.Calibration:
        return calibration.calibrate(
            budget.epsilon,
            budget.delta,
            steps,
            batch,
            users,
            amplification=amplification,
            records_per_user=budget.records_per_user,
            sampling=budget.sampling,
        )

    found = calibrate(how)
    # No noise at all is within the letter of a delta that is more than the chance of
    # ever being sampled. It is not what anyone means by private.
    none = np.asarray(found.noise_multiplier) == 0
    if none.any() and how == "lower":
        fixed = calibrate("none")
        found = calibration.Calibration(
            np.where(none, fixed.noise_multiplier, found.noise_multiplier),
            np.where(none, fixed.ratio, found.ratio),
            found.amplified & ~none,
        )
    return found


def noise_grid(
    budget: Budget, batch: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Noise multiplier, ratio and whether batches are Poisson samples, of a grid, each
    ``[B, T]``. Calibrated at powers of two of rates and steps; between, how far the
    noise is off its central limit is interpolated: to 1 % at worst, mostly to 0.01 %.
    What is found is calibrated by itself.
    """
    key = replace(budget, flops=1, seconds=1, memory=1, tokens=1)
    key = replace(key, parameters=None, batch_size=None, steps=None)
    return _cached_grid(key, tuple(batch), tuple(steps))


@lru_cache(maxsize=32)
def _cached_grid(
    budget: Budget, batch: Tuple[float, ...], steps: Tuple[float, ...]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    b, t = np.array(batch), np.array(steps)
    noise = noise_of(budget, b[:, None], t, amplification="none").noise_multiplier
    amplified = np.zeros(noise.shape, dtype=bool)
    if budget.amplification != "none":
        parts = batches_per_epoch(budget, b)
        axes = (parts, _knots(parts)), (t, _knots(t))
        kp, kt = axes[0][1], axes[1][1]
        known = noise_of(
            budget, (budget.examples / kp)[:, None], kt, amplification="poisson"
        ).noise_multiplier
        limit = _central_limit(budget, kp, kt)
        off = np.log(np.where(known > 0, known, limit) / limit)
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


def _knots(values: np.ndarray) -> np.ndarray:
    """Powers of two, the same for every range but for its ends."""
    inner = 2.0 ** np.arange(100)
    low, high = values.min(), values.max()
    inside = (inner > 1.2 * low) & (inner < high / 1.2)
    return np.unique([low, *inner[inside], high])


def _central_limit(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The noise of many steps, ``[parts, T]``."""
    mu = 1 / calibration.gaussian_noise_multiplier(budget.epsilon, budget.delta)
    return central_limit(mu, 1 / parts[:, None], steps)


@lru_cache(maxsize=1024)
def advantage(
    budget: Budget, noise: float, parts: float, steps: float, amplified: bool
) -> float:
    """Of membership inference at most, with so many batches an epoch."""
    records = budget.records_per_user if budget.sampling == "records" else 1
    if amplified:
        return float(calibration.delta(noise, 1 / parts, steps, 0.0, records))
    # In fixed batches all records of a user are in the same one at worst.
    times = math.ceil(steps / parts)
    return float(calibration.delta(noise / records, 1.0, times, 0.0))


def verified_noise(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    delta: float,
    most: float = 1.05,
) -> float:
    """
    The noise multiplier, raised until the accountant's upper bound is epsilon at most.

    Args:
        most: how much more than what was calibrated is still believed

    Raises:
        Refused: if that much more is not enough: the accountants disagree
    """
    factor, step = 1.0, 1e-3
    while factor <= most:
        accountant = PRVBoundsAccountant()
        accountant.history = [(noise_multiplier * factor, sample_rate, int(steps))]
        if accountant.get_epsilon(delta) <= epsilon:
            return noise_multiplier * factor
        factor, step = factor + step, 2 * step
    raise Refused(
        f"noise_multiplier={noise_multiplier:g} was calibrated for epsilon={epsilon:g},"
        f" delta={delta:g}, {steps} steps at sample rate {sample_rate:g}; the "
        f"accountant finds more, up to {most} times that noise.",
        parameter="noise_multiplier",
        remedy="Please report it.",
    )
