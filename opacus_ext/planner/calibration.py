"""
How much noise a privacy budget asks for, over whole grids of budgets.

The scaling laws of private training (McKenna et al. 2025, "Scaling Laws for
Differentially Private Language Models", section 2 and appendix B) know the noise only
through the noise-batch ratio, sigma / B. A plan asks for thousands of them.

All come from the privacy profile delta(epsilon) of the removal of a user, see
:mod:`opacus_ext.planner.saddle_point`. What can't be had to the stated precision is
refused.

A calibrated noise multiplier spends delta but for a part in 20,000, which is more than
all numerical errors, and lies within 0.01 % above the least one that would do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from opacus_ext.accountants.profiles import gaussian_log_delta, gaussian_sensitivity
from opacus_ext.planner.noise_search import NoiseSearch
from opacus_ext.planner.privacy_loss import SampledGaussian, TooHardError
from opacus_ext.planner.saddle_point import log_profile
from opacus_ext.planner.solver import (
    MARGIN,
    check_budget,
    checked,
    excess_of,
    log_target,
    on_cells,
    plain,
    root,
    surely,
)
from opacus_ext.refused import Refused


class Calibration(NamedTuple):
    """
    The least noise for a budget, from :func:`calibrate`: arrays of one shape.

    Attributes:
        noise_multiplier: sigma, for ``make_private``
        ratio: the noise-batch ratio, sigma / B
        amplified: whether it is that of Poisson sampling, or of deterministic batches
    """

    noise_multiplier: Any
    ratio: Any
    amplified: Any


class Doubling(NamedTuple):
    """What doubling a budget saves, ``ratio(x) / ratio(2 x) - 1``, for each budget."""

    epsilon: Any
    batch_size: Any
    users: Any


def delta(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    epsilon: ArrayLike = 0.0,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    The delta that DP-SGD with Poisson sampling has at ``epsilon``: its privacy profile.

    It is that of a user who is left out, as Opacus's and Microsoft's accountants have
    it. That of one who is put in has been smaller wherever it was compared.

    At epsilon 0 it is the advantage of the best membership inference: by how much its
    true positive rate may exceed its false positive rate. Plans of equal (epsilon,
    delta) differ in it (Kaissis et al. 2024). Of deterministic batches, take
    ``sample_rate=1`` and the number of batches that hold a user for ``steps``.

    Args:
        noise_multiplier: sigma, over the clipping norm; 0 for no noise
        sample_rate: chance of each record to be in a batch, in (0, 1]
        steps: whole numbers
        epsilon: at least 0
        records_per_user: that are drawn independently, all of a user's to be protected

    Returns:
        of the broadcast shape, a float for numbers; to a relative 1e-5, where it is
        above 1e-250

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(delta(1.0, 0.01, 1000), 4)
        0.161
        >>> delta(1.0, 0.01, 1000, epsilon=[1.0, 2.0]).round(7).tolist()
        [0.0026124, 2.7e-06]
    """
    columns = (
        checked("noise_multiplier", noise_multiplier, at_least=0),
        checked("sample_rate", sample_rate, above=0, at_most=1),
        checked("steps", steps, at_least=1, whole=True),
        checked("epsilon", epsilon, at_least=0),
        checked("records_per_user", records_per_user, at_least=1, whole=True),
    )

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


def epsilon(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    delta: ArrayLike,
    records_per_user: ArrayLike = 1,
) -> Any:
    """
    The least epsilon that DP-SGD with Poisson sampling has at ``delta``.

    Args:
        delta: in (0, 1)
        noise_multiplier, sample_rate, steps, records_per_user: as in :func:`delta`

    Returns:
        of the broadcast shape, a float for numbers; infinite where there is no noise

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(epsilon(1.0, 0.01, 1000, delta=1e-5), 4)
        1.8282
    """
    columns = (
        checked("noise_multiplier", noise_multiplier, at_least=0),
        checked("sample_rate", sample_rate, above=0, at_most=1),
        checked("steps", steps, at_least=1, whole=True),
        checked("delta", delta, above=0, below=1),
        checked("records_per_user", records_per_user, at_least=1, whole=True),
    )

    def solve(s: float, q: float, steps: float, delta: float, k: float) -> float:
        step = SampledGaussian(s, q, int(k))
        log_delta = math.log(delta) + math.log1p(-MARGIN)
        if log_profile(step, steps, 0.0)[0] <= log_delta:
            return 0.0
        if s == 0:
            return math.inf

        # the central limit, as in solver.central_limit
        mu = k * q * math.sqrt(steps * math.expm1(min(1 / s**2, 50.0)))
        start = np.linspace(-7.0, 7.0, 100)
        limit = gaussian_log_delta(min(max(mu, 1e-4), 40.0), np.exp(start))
        start = float(start[np.abs(limit - log_delta).argmin()])

        def search(fineness: float) -> float:
            tilt = 1.0

            def profile(x: float) -> float:
                nonlocal tilt
                value, tilt = log_profile(step, steps, math.exp(x), tilt, fineness)
                return value

            excess = excess_of(profile, log_delta)
            result = math.exp(root(excess, start, 1.0)[0])
            check_budget(step, steps, result, delta, tilt)
            return result

        return surely(search)

    return on_cells(solve, ("noise", "rate", "steps", "delta", "records"), columns)


def gaussian_noise_multiplier(
    epsilon: ArrayLike, delta: ArrayLike, participations: ArrayLike = 1
) -> Any:
    """
    The least noise for a budget without amplification, in closed form.

    It is that of a Gaussian mechanism (Balle & Wang 2018, "Improving the Gaussian
    Mechanism for Differential Privacy", theorem 8) with sqrt(participations) times the
    sensitivity of one.

    Args:
        epsilon: positive
        delta: in (0, 1)
        participations: number of batches that hold a user's record

    Raises:
        Refused: if an argument is out of its range

    Example:
        >>> round(gaussian_noise_multiplier(1.0, 1e-5), 4)
        3.7306
        >>> gaussian_noise_multiplier(1.0, 1e-5, [4, 16]).round(3).tolist()
        [7.461, 14.923]
    """
    epsilon = checked("epsilon", epsilon, above=0)
    delta = checked("delta", delta, above=0, below=1)
    participations = checked("participations", participations, at_least=1, whole=True)
    return plain(
        np.sqrt(participations) / gaussian_sensitivity(epsilon, log_target(delta))
    )


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
    The least noise for a budget under DP-SGD with Poisson sampling.

    0 where none is needed: if the chance that a user is ever sampled is at most delta.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps: whole numbers
        sample_rate: chance of each record to be in a batch, in (0, 1]
        records_per_user: that are drawn independently, all of a user's to be protected
            together (the noise is still relative to the clipping norm of one)
        rough: to a thousandth and unchecked, for comparisons, in a third of the time

    Returns:
        of the broadcast shape, a float for numbers

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> round(noise_multiplier(8.0, 1e-5, steps=1000, sample_rate=0.01), 4)
        0.5863
        >>> noise_multiplier([1.0, 2.0], 1e-5, 1000, 0.01).round(3).tolist()
        [1.415, 0.959]
    """
    columns = (
        checked("epsilon", epsilon, above=0),
        checked("delta", delta, above=0, below=1),
        checked("records_per_user", records_per_user, at_least=1, whole=True),
        checked("steps", steps, at_least=1, whole=True),
        checked("sample_rate", sample_rate, above=0, at_most=1),
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
    The least noise for a budget, a batch size and a number of users.

    Args:
        epsilon: positive
        delta: in (0, 1)
        steps: whole numbers, T
        batch_size: expected number of users (of records, if these are sampled) in a
            batch, B, at most all
        users: N
        amplification: "poisson": each is in a batch with probability B / N. "none":
            deterministic batches, which hold each ``ceil(T B / N)`` times. "lower":
            what needs less noise of the two, as the paper does (appendix B.1); what you
            train with must be that one
        records_per_user: of the users' records
        sampling: what a batch is drawn of, and what is clipped to a norm of its own. Of
            "users" (the paper's appendix B.2: however much data each has), the number
            of records doesn't matter. Of "records", a user is protected with all of
            them: drawn independently by Poisson sampling; in deterministic batches all
            in the same ones at worst

    Raises:
        Refused: if an argument is out of its range, or the answer can't be computed

    Example:
        >>> found = calibrate(4.0, 1e-8, 16000, batch_size=[2**10, 2**16], users=2**24)
        >>> found.noise_multiplier.round(4).tolist()
        [0.471, 0.9641]
        >>> found.amplified.tolist()
        [True, True]
    """
    if amplification not in ("lower", "poisson", "none"):
        raise Refused(
            'amplification must be "lower", "poisson" or "none", '
            f"not {amplification!r}.",
            parameter="amplification",
        )
    if sampling not in ("users", "records"):
        raise Refused(
            f'sampling must be "users" or "records", not {sampling!r}.',
            parameter="sampling",
        )
    batch_size = checked("batch_size", batch_size, above=0)
    users = checked("users", users, at_least=1)
    steps = checked("steps", steps, at_least=1, whole=True)
    records = checked("records_per_user", records_per_user, at_least=1, whole=True)
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
        # less a hair's breadth, the rounding of a whole number
        times = np.maximum(np.ceil(steps * rate * (1 - 1e-12)), 1)
        fixed = records * gaussian_noise_multiplier(epsilon, delta, times)
    least = np.minimum(poisson, fixed)
    least, batch_size, amplified = np.broadcast_arrays(
        least, batch_size, poisson <= fixed
    )
    return Calibration(plain(least), plain(least / batch_size), plain(amplified))


def noise_batch_ratio(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    **options: Any,
) -> Any:
    """
    The standard deviation of the noise in an averaged gradient, over the clipping norm.

    That is sigma(epsilon, delta, T, B / N) / B, the variable of the scaling laws.

    Args:
        epsilon, delta, steps, batch_size, users: as in :func:`calibrate`
        options: likewise

    Returns:
        of the broadcast shape, a float for numbers

    Example:
        >>> round(1e6 * noise_batch_ratio(4.0, 1e-8, 16000, 65536, 2**24), 3)
        14.712
    """
    return calibrate(epsilon, delta, steps, batch_size, users, **options).ratio


def doubling(
    epsilon: ArrayLike,
    delta: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    users: ArrayLike,
    **options: Any,
) -> Doubling:
    """
    What doubling epsilon, the batch or the users takes off the noise-batch ratio.

    Each as ``ratio(x) / ratio(2 x) - 1``, the arrows of the paper's Figure 4: 1 where
    the ratio is halved, 0 where nothing is won.

    Args:
        epsilon, delta, steps, batch_size, users: as in :func:`calibrate`
        options: likewise

    Returns:
        of the broadcast shape; NaN for a batch that can't be doubled, because it would
        hold more than all

    Example:
        >>> saved = doubling(4.0, 1e-8, 16000, 65536, 2**24)
        >>> [round(arrow, 3) for arrow in saved]
        [0.337, 0.238, 0.324]
    """
    records = options.pop("records_per_user", 1)
    epsilon, delta, steps, batch_size, users, records = np.broadcast_arrays(
        checked("epsilon", epsilon, above=0),
        checked("delta", delta, above=0, below=1),
        checked("steps", steps, at_least=1, whole=True),
        checked("batch_size", batch_size, above=0),
        checked("users", users, at_least=1),
        checked("records_per_user", records, at_least=1, whole=True),
    )
    everyone = users * (records if options.get("sampling") == "records" else 1)
    fits = 2 * batch_size <= everyone
    ratio = noise_batch_ratio(
        np.stack([epsilon, 2 * epsilon, epsilon, epsilon]),
        delta,
        steps,
        np.stack(
            [batch_size, batch_size, np.where(fits, 2, 1) * batch_size, batch_size]
        ),
        np.stack([users, users, users, 2 * users]),
        records_per_user=records,
        **options,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = np.where(ratio[0] == ratio[1:], 0.0, ratio[0] / ratio[1:] - 1)
    saved[1] = np.where(fits, saved[1], np.nan)
    return Doubling(*map(plain, saved))
