"""The noise of a budget, of single configurations and of whole grids of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional, Tuple

import numpy as np
from scipy.interpolate import make_interp_spline

from opacus_ext.accountants.composition import Composition
from opacus_ext.planner import calibration
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.privacy_loss import WORK
from opacus_ext.planner.solver import central_limit, plain
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.data.sampling import Sampling

_WORK = 1.5 * 2.0**27  # of a grid: 4 seconds, where most take a fifth of it


def batches_per_epoch(budget: Budget, batch: Any) -> np.ndarray:
    """
    Whole batches of an epoch, where they are not Poisson samples: what is over stays
    out of this epoch. More users then never mean more noise.
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
    batch, steps = np.asarray(batch, dtype=float), np.asarray(steps, dtype=float)
    poisson: Any = np.inf
    if how != "none":
        rate = batch / budget.examples
        poisson = np.asarray(
            calibration.noise_multiplier(
                budget.epsilon, budget.delta, steps, rate, records_of(budget)
            )
        )
    fixed: Any = np.inf
    if how != "poisson":
        times = np.maximum(np.ceil(steps / batches_per_epoch(budget, batch)), 1)
        fixed = records_of(budget) * np.asarray(
            calibration.gaussian_noise_multiplier(budget.epsilon, budget.delta, times)
        )
    # No noise at all is within the letter of a delta that is more than the chance of
    # ever being sampled. It is not what anyone means by private.
    amplified = (poisson <= fixed) & ((poisson > 0) | (how == "poisson"))
    least = np.where(amplified, poisson, fixed)
    shape = np.broadcast_shapes(least.shape, batch.shape)
    return calibration.Calibration(
        *(plain(np.broadcast_to(x, shape)) for x in (least, least / batch, amplified))
    )


def records_of(budget: Budget) -> int:
    """How many of a user's records steps draw, each for itself."""
    return budget.records_per_user if budget.sampling == "records" else 1


def noise_grid(
    budget: Budget, batch: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Noise multiplier, ratio and whether batches are Poisson samples, of a grid, each
    ``[B, T]``. Calibrated at powers of two of rates and of four of steps; between, how
    far the noise is off its central limit is interpolated: to 1 % at worst, mostly to
    0.1 %. What is found is calibrated by itself.
    """
    key = replace(budget, flops=1, seconds=1, memory=1, tokens=1)
    key = replace(key, parameters=None, trainable=None, batch_size=None, steps=None)
    key = replace(key, max_batch_size=None, physical_batch_size=1)
    return _cached_grid(key, tuple(batch), tuple(steps))


@lru_cache(maxsize=32)
def _cached_grid(
    budget: Budget, batch: Tuple[float, ...], steps: Tuple[float, ...]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    b, t = np.array(batch), np.array(steps)
    noise = noise_of(budget, b[:, None], t, amplification="none").noise_multiplier
    amplified = np.zeros(noise.shape, dtype=bool)
    if budget.amplification != "none":
        parts = budget.examples / b
        kp, kt = _knots(parts, 2), _knots(t, 4)
        axes = (parts, kp), (t, kt)
        known = _known(budget, kp, kt)
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


def _knots(values: np.ndarray, base: int) -> np.ndarray:
    """Powers of a base around a range: the same for every budget."""
    low, high = np.log([values.min(), values.max()]) / math.log(base)
    return base ** np.arange(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1.0)


def _known(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """
    Calibrated noise, ``[parts, T]``.

    Raises:
        Refused: where that would take long
    """
    privacy = budget.epsilon, budget.delta, records_of(budget)
    with WORK.bounded(_WORK):
        try:
            return np.array([_knot(*privacy, part, tuple(steps)) for part in parts])
        except Refused as error:
            if WORK.rest > 0:
                raise
            raise Refused(
                f"A plan for epsilon={budget.epsilon:g}, delta={budget.delta:g} and "
                f"{records_of(budget)} records of a user in {len(parts)} batch sizes "
                "takes too long to calibrate.",
                parameter="batch_size",
                remedy="Bound batch_size and steps to narrower ranges, or take a "
                "larger delta or fewer records of a user.",
            ) from error


@lru_cache(maxsize=1024)
def _knot(
    epsilon: float, delta: float, records: int, part: float, steps: Tuple[float, ...]
) -> np.ndarray:
    """The noise at one rate, which more users have too, after so many steps."""
    return np.asarray(
        calibration.noise_multiplier(
            epsilon, delta, steps, 1 / part, records, rough=True
        )
    )


def _central_limit(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The noise of many steps, ``[parts, T]``."""
    mu = 1 / calibration.gaussian_noise_multiplier(budget.epsilon, budget.delta)
    return central_limit(mu, 1 / parts[:, None], steps)


@lru_cache(maxsize=1024)
def advantage(
    budget: Budget, noise: float, batch: float, steps: float, amplified: bool
) -> float:
    """Of membership inference at most."""
    records = records_of(budget)
    if amplified:
        rate = batch / budget.examples
        return float(calibration.delta(noise, rate, steps, 0.0, records))
    # In fixed batches all records of a user are in the same one at worst.
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
    """
    The noise multiplier, raised until the accountant's upper bound is epsilon at most.

    Args:
        sampling: how batches are drawn, of so many records
        most: how much more than what was calibrated is still believed

    Raises:
        Refused: if that much more is not enough: the accountants disagree
    """
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
