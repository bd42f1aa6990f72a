"""
The noise multiplier that a privacy budget needs, over whole grids of budgets.

All come from the privacy profile delta(epsilon) of the removal of a user, see
:mod:`opacus_ext.accountants.saddle_point`. A calibrated noise multiplier leaves a part
in 20,000 of delta unspent, which is more than all numerical errors, and lies within
0.01 % above the least possible one.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from opacus_ext.accountants.profiles import gaussian_sensitivity
from opacus_ext.accountants.saddle_point import (
    SampledGaussian,
    TooHardError,
    log_profile,
)
from opacus_ext.accountants.solver import (
    MARGIN,
    NoiseSearch,
    checked,
    log_target,
    on_cells,
    plain,
    surely,
)
from opacus_ext.refused import Refused

#: The range of each argument, see :func:`checked`.
_RANGES: Dict[str, Dict[str, Any]] = {
    "noise_multiplier": dict(at_least=0),
    "sample_rate": dict(above=0, at_most=1),
    "steps": dict(at_least=1, whole=True),
    "epsilon": dict(above=0),
    "delta": dict(above=0, below=1),
    "records_per_user": dict(at_least=1, whole=True),
    "participations": dict(at_least=1, whole=True),
    "batch_size": dict(above=0),
    "users": dict(at_least=1),
}


def _checked(**given: ArrayLike) -> Any:
    return [checked(name, value, **_RANGES[name]) for name, value in given.items()]


class Calibration(NamedTuple):
    """
    The least noise for a budget, from :func:`calibrate`: arrays of one shape.

    Attributes:
        noise_multiplier: sigma, for ``make_private``
        ratio: the noise-batch ratio, sigma / B
        amplified: True for Poisson sampling, False for deterministic batches
    """

    noise_multiplier: Any
    ratio: Any
    amplified: Any


def delta(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    epsilon: ArrayLike = 0.0,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    Returns the delta of DP-SGD with Poisson sampling at ``epsilon``, when a user is
    removed; when one is added it was smaller in every comparison.

    At epsilon 0 it is the advantage of the best membership inference: the most by which
    its true positive rate exceeds its false positive rate (Kaissis et al. 2024). For
    deterministic batches, take ``sample_rate=1`` and the number of batches that hold a
    user for ``steps``.

    Args:
        noise_multiplier: sigma, over the clipping norm; 0 for no noise
        sample_rate: probability of each record to be in a batch, in (0, 1]
        steps: whole numbers
        epsilon: at least 0
        records_per_user: records of a user, drawn independently and protected together

    Returns:
        of the broadcast shape, a float for numbers; to a relative 1e-5, where it is
        above 1e-250

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> delta(1.0, 0.01, 1000, epsilon=[1.0, 2.0]).round(7).tolist()
        [0.0026124, 2.7e-06]
    """
    columns = _checked(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps
    )
    columns.append(checked("epsilon", epsilon, at_least=0))
    columns += _checked(records_per_user=records_per_user)

    def solve(s: float, q: float, steps: float, epsilon: float, k: float) -> float:
        step = SampledGaussian(s, q, int(k))
        strict, tilt = log_profile(step, steps, epsilon, fineness=1.2)

        def compare(fineness: float) -> float:
            other = log_profile(step, steps, epsilon, tilt, fineness)[0]
            if abs(other - strict) > MARGIN:
                raise TooHardError
            return min(math.exp(strict), 1.0)

        return surely(compare)

    return on_cells(solve, ("noise", "rate", "steps", "epsilon", "records"), columns)


def gaussian_noise_multiplier(
    epsilon: ArrayLike, delta: ArrayLike, participations: ArrayLike = 1
) -> Any:
    """
    Returns the least noise for a budget without amplification, in closed form: that of
    a Gaussian mechanism (Balle & Wang 2018, theorem 8) with sqrt(participations) times
    the sensitivity.

    Args:
        epsilon: positive
        delta: in (0, 1)
        participations: number of batches that hold a user's record

    Raises:
        Refused: if an argument is out of its range

    Example:
        >>> gaussian_noise_multiplier(1.0, 1e-5, [4, 16]).round(3).tolist()
        [7.461, 14.923]
    """
    epsilon, delta, times = _checked(
        epsilon=epsilon, delta=delta, participations=participations
    )
    return plain(np.sqrt(times) / gaussian_sensitivity(epsilon, log_target(delta)))


def noise_multiplier(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    sample_rate: ArrayLike,
    records_per_user: ArrayLike = 1,
    *,
    rough: bool = False,
) -> Any:
    """
    Returns the least noise for a budget under DP-SGD with Poisson sampling; 0 if the
    probability that a user is ever sampled is at most delta.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps, sample_rate, records_per_user: as in :func:`delta`, with its errors; the
            noise is relative to the clipping norm of one record
        rough: True for a precision of a thousandth, unchecked, in a third of the time

    Returns:
        of the broadcast shape, a float for numbers

    Example:
        >>> noise_multiplier([1.0, 2.0], 1e-5, 1000, 0.01).round(3).tolist()
        [1.415, 0.959]
    """
    columns = _checked(
        epsilon=epsilon,
        delta=delta,
        records_per_user=records_per_user,
        steps=steps,
        sample_rate=sample_rate,
    )
    names = ("epsilon", "delta", "records", "steps", "rate")
    return on_cells(NoiseSearch(rough), names, columns)


def calibrate(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    *,
    amplification: str = "lower",
    records_per_user: ArrayLike = 1,
    sampling: str = "users",
) -> Calibration:
    """
    Returns the least noise for a budget, a batch size and a number of users.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps: whole numbers, T
        batch_size: expected number of users (of records, if these are sampled) in a
            batch, B, at most all
        users: N
        amplification: "poisson": each is in a batch with probability B / N. "none":
            deterministic batches, which hold each ``ceil(T B / N)`` times. "lower": the
            one that needs less noise (McKenna et al. 2025, "Scaling Laws for
            Differentially Private Language Models", appendix B.1); train with that one
        records_per_user: number of records of each user
        sampling: the unit that is drawn and clipped. With "users" the number of records
            doesn't matter. With "records" a user is protected with all of them: drawn
            independently, or all in the same deterministic batches at worst

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> found = calibrate(4.0, 1e-8, 16000, batch_size=[2**10, 2**16], users=2**24)
        >>> found.noise_multiplier.round(4).tolist(), found.amplified.tolist()
        ([0.471, 0.9641], [True, True])
    """
    for name, value, known in (
        ("amplification", amplification, ("lower", "poisson", "none")),
        ("sampling", sampling, ("users", "records")),
    ):
        if value not in known:
            raise Refused(
                f"{name} must be one of {known}, not {value!r}.", parameter=name
            )
    batch_size, users, steps, records = _checked(
        batch_size=batch_size,
        users=users,
        steps=steps,
        records_per_user=records_per_user,
    )
    if sampling == "users":
        records = np.ones_like(records)
    rate = batch_size / (users * records)
    if (rate > 1).any():
        worst = np.unravel_index(rate.argmax(), rate.shape)
        batch, limit = np.broadcast_arrays(batch_size, users * records)
        raise Refused(
            f"batch_size must be at most the number of {sampling}, {limit[worst]:g}, "
            f"not {batch[worst]:g}.",
            parameter="batch_size",
        )
    poisson: Any = np.inf
    if amplification != "none":
        poisson = noise_multiplier(epsilon, delta, steps, rate, records)
    fixed: Any = np.inf
    if amplification != "poisson":
        # The factor keeps a whole number whole in spite of rounding.
        times = np.maximum(np.ceil(steps * rate * (1 - 1e-12)), 1)
        fixed = records * gaussian_noise_multiplier(epsilon, delta, times)
    return lower_noise(poisson, fixed, poisson <= fixed, batch_size)


def lower_noise(
    poisson: Any, fixed: Any, amplified: Any, batch_size: Any
) -> Calibration:
    """Returns a calibration with the noise of Poisson samples where ``amplified``."""
    noise = np.where(amplified, poisson, fixed)
    parts = np.broadcast_arrays(noise, noise / batch_size, amplified)
    return Calibration(*map(plain, parts))
