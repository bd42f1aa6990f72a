"""
The noise multiplier that a privacy budget needs: over whole grids of budgets, and of
what an accountant has left of one.

Those of grids come from the privacy profile delta(epsilon) of the removal of a user,
see :mod:`opacus_ext.accountants.saddle_point`. A calibrated noise multiplier leaves a
part in 20,000 of delta unspent, which is more than all numerical errors, and lies
within 0.01 % above the least possible one.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_ext.accountants.saddle_point import (
    SampledGaussian,
    TooHardError,
    log_profile,
)
from opacus_ext.accountants.solver import (
    MARGIN,
    NoiseSearch,
    checked,
    on_cells,
    plain,
    surely,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus.accountants.accountant import IAccountant

#: The range of each argument, see :func:`checked`.
_RANGES: Dict[str, Dict[str, Any]] = {
    "noise_multiplier": dict(at_least=0),
    "sample_rate": dict(above=0, at_most=1),
    "steps": dict(at_least=1, whole=True),
    "epsilon": dict(above=0),
    "delta": dict(above=0, below=1),
    "records_per_user": dict(at_least=1, whole=True),
    "batch_size": dict(above=0),
    "users": dict(at_least=1),
}
_CHOICES = {
    "amplification": ("lower", "poisson", "none"),
    "sampling": ("users", "records"),
}


def _checked(**arguments: ArrayLike) -> Dict[str, NDArray]:
    return {
        name: checked(name, value, **_RANGES[name]) for name, value in arguments.items()
    }


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
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        steps=steps,
        records_per_user=records_per_user,
    )

    def solve(
        noise_multiplier: float,
        sample_rate: float,
        steps: float,
        records_per_user: float,
        epsilon: float,
    ) -> float:
        step = SampledGaussian(noise_multiplier, sample_rate, int(records_per_user))
        strict, tilt = log_profile(step, steps, epsilon, fineness=1.2)

        def compare(fineness: float) -> float:
            other = log_profile(step, steps, epsilon, tilt, fineness)[0]
            if abs(other - strict) > MARGIN:
                raise TooHardError
            return min(math.exp(strict), 1.0)

        return surely(compare)

    return on_cells(solve, **columns, epsilon=checked("epsilon", epsilon, at_least=0))


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

    At a rate of 1 it is the noise of ``steps`` Gaussian mechanisms, and so of
    deterministic batches that hold a user so often, in closed form (Balle & Wang 2018,
    theorem 8); it grows with the root of ``steps``.

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
        >>> noise_multiplier(1.0, 1e-5, [4, 16], 1.0).round(3).tolist()
        [7.461, 14.923]
    """
    columns = _checked(
        epsilon=epsilon,
        delta=delta,
        records_per_user=records_per_user,
        steps=steps,
        sample_rate=sample_rate,
    )
    return on_cells(NoiseSearch(rough), **columns)


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
    for name, value in (("amplification", amplification), ("sampling", sampling)):
        if value not in _CHOICES[name]:
            raise Refused(
                f"{name} must be one of {_CHOICES[name]}, not {value!r}.",
                parameter=name,
            )
    batch, population, times, records = _checked(
        batch_size=batch_size,
        users=users,
        steps=steps,
        records_per_user=records_per_user,
    ).values()
    if sampling == "users":
        records = np.ones_like(records)
    batch, population = np.broadcast_arrays(batch, population * records)
    rate = batch / population
    if (rate > 1).any():
        worst = np.unravel_index(rate.argmax(), rate.shape)
        raise Refused(
            f"batch_size must be at most the number of {sampling}, "
            f"{population[worst]:g}, not {batch[worst]:g}.",
            parameter="batch_size",
        )
    poisson: Any = np.inf
    if amplification != "none":
        poisson = noise_multiplier(epsilon, delta, times, rate, records)
    fixed: Any = np.inf
    if amplification != "poisson":
        # The factor keeps a whole number whole in spite of rounding.
        times = np.maximum(np.ceil(times * rate * (1 - 1e-12)), 1)
        fixed = records * np.sqrt(times) * noise_multiplier(epsilon, delta, 1, 1.0)
    # At a rate of 1 they are the same, but for rounding.
    amplified = poisson <= fixed * (1 + 1e-12)
    return lower_noise(poisson, fixed, amplified, batch)


def lower_noise(
    poisson: Any, fixed: Any, amplified: Any, batch_size: Any
) -> Calibration:
    """Returns a calibration with the noise of Poisson samples where ``amplified``."""
    noise = np.where(amplified, poisson, fixed)
    parts = np.broadcast_arrays(noise, noise / batch_size, amplified)
    return Calibration(*map(plain, parts))


def noise_left(
    accountant: IAccountant,
    epsilon: float,
    delta: float,
    sample_rate: float = 1.0,
    steps: int = 1,
    *,
    record: Optional[Callable[[IAccountant, float], None]] = None,
) -> float:
    """
    Returns the noise multiplier of a run that spends the rest of a budget, but for 0.01
    of epsilon.

    Args:
        accountant: of the releases before the run; is not changed
        epsilon, delta: of the whole budget
        sample_rate, steps: of the run
        record: for a run of another kind, in the place of these two: records it with an
            accountant, at a noise

    Raises:
        Refused: if nothing is left, or an argument is out of its range

    Example:
        >>> from opacus.accountants import RDPAccountant
        >>> accountant = RDPAccountant()
        >>> accountant.step(noise_multiplier=20.0, sample_rate=1.0)
        >>> f"{noise_left(accountant, 5.0, 1e-5, 0.1, 100):.2f}"
        '1.29'
    """
    _checked(epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps)

    from opacus_ext.accountants.stock import in_place_of  # imports Opacus

    def spent(noise: float) -> float:
        trial = in_place_of(deepcopy(accountant))  # with its state beside the history
        if record is None:
            trial.history = [*accountant.history, (noise, sample_rate, steps)]
        else:
            record(trial, noise)
        return trial.get_epsilon(delta)

    low, high = 0.0, 1.0
    with progress(what="calibrating noise", unit="try") as bar:
        while (reached := spent(high)) > epsilon:
            bar.update()
            low, high = high, 2 * high
            if high > 1e4:
                raise Refused(
                    f"epsilon={epsilon:g} is spent before the first step: "
                    f"{dict(accountant.state_dict())}.",
                    parameter="epsilon",
                    remedy="Raise epsilon, or leave out what was spent before.",
                )
        while epsilon - reached > 0.01 and high - low > 1e-4 * high:
            bar.update()
            middle = (low + high) / 2
            if (trial := spent(middle)) <= epsilon:
                high, reached = middle, trial
            else:
                low = middle
    return high
