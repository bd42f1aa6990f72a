"""How noise, epsilon and delta are solved for, cell by cell, and checked."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence, Tuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_ext.accountants.profiles import gaussian_sensitivity
from opacus_ext.planner.privacy_loss import WORK, SampledGaussian, TooHardError
from opacus_ext.planner.saddle_point import log_profile
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

MARGIN = 5e-5  # of delta, relative, that a calibrated noise leaves unspent
_WORK = 2.0**30  # of a cell: 10 seconds, where most take a thousandth of it


def central_limit(mu: ArrayLike, sample_rate: ArrayLike, steps: ArrayLike) -> Any:
    """
    The noise of many steps, mu = q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al., "Deep
    learning with Gaussian differential privacy", 2020).
    """
    return 1 / np.sqrt(np.log1p((np.divide(mu, sample_rate)) ** 2 / steps))


def log_target(delta: ArrayLike) -> Any:
    """What a search for noise aims at: a little less than the log of delta."""
    return np.log(delta) + math.log1p(-MARGIN)


class Guess:
    """A start for the next cell: the central limit, and how far off it was last."""

    def __init__(self) -> None:
        self.budget: Any = None
        self.mu = self.limit = 0.0
        self.forget()

    def start(
        self, epsilon: float, delta: float, k: float, steps: float, q: float
    ) -> float:
        """The log of a noise multiplier near that of this cell."""
        if self.budget != (epsilon, delta, k):
            self.forget()
            self.budget = epsilon, delta, k
            self.mu = float(gaussian_sensitivity(epsilon, math.log(delta)))
        self.limit = math.log(central_limit(self.mu / k, q, steps))
        return self.limit + self.off

    def forget(self) -> None:
        self.tilt, self.slope, self.off = 1.0, 2.0, 0.0

    def correct(self, log_noise: float) -> None:
        self.off = log_noise - self.limit


def excess_of(
    log_profile: Callable[[float], float], log_delta: float
) -> Callable[[float], float]:
    """Of noise or epsilon, increasing; on the way to its zero a rough value will do."""

    def excess(x: float) -> float:
        try:
            value = log_profile(x)
        except TooHardError as error:
            if not error.args:
                raise
            value = error.args[0]
        return math.log(max(-value, 1e-300) / -log_delta)

    return excess


def root(
    f: Callable[[float], float], x: float, slope: float, tolerance: float = 3e-6
) -> Tuple[float, float]:
    """
    Zero of an increasing function, by secants within a bracket, and its slope.

    Not by ``scipy.optimize.brentq``: ``f`` is an integral, a neighbor's slope makes
    three evaluations enough, and far from the zero a rough value is all there is.
    """
    low, high, value = -math.inf, math.inf, f(x)
    for _ in range(100):
        low, high = (x, high) if value < 0 else (low, x)
        new = x - min(max(value / slope, -0.7), 0.7)
        if abs(value) < tolerance:  # and less after this step
            return new, slope
        if not low < new < high:
            new = (low + high) / 2
        if new == x:  # what is left are errors of f
            break
        new_value = f(new)
        rise = (new_value - value) / (new - x)
        slope = max(rise, slope / 4)  # or it would stop on a plateau
        x, value = new, new_value
    raise TooHardError


def check_budget(
    step: SampledGaussian, steps: float, epsilon: float, delta: float, tilt: float
) -> None:
    """Other sums than those that found it must find that the budget holds."""
    log_delta = log_profile(step, steps, epsilon, tilt, 1.2)[0]
    if not -1e-3 < log_delta - math.log(delta) <= 0:
        raise TooHardError


def surely(attempt: Callable[[float], float]) -> float:
    """Once more with finer sums, if a result doesn't stand the check."""
    try:
        return attempt(1.0)
    except TooHardError:
        pass
    return attempt(1.4)


def on_cells(
    solve: Callable[..., float], names: Sequence[str], columns: Sequence[NDArray]
) -> Any:
    """``solve`` for each distinct row of the broadcast columns, neighbors in turn."""
    columns = np.broadcast_arrays(*columns)
    rows = np.stack([column.ravel() for column in columns], axis=1)
    rows, where = np.unique(rows, axis=0, return_inverse=True)
    values = np.empty(len(rows))
    bar = progress(rows, "calibrating noise", show=len(rows) > 1)
    for i, row in enumerate(bar):
        allowed = WORK.left = min(_WORK, WORK.rest)
        try:
            values[i] = solve(*row.tolist())
        except TooHardError:
            cell = ", ".join(f"{name} = {x:g}" for name, x in zip(names, row))
            raise Refused(
                f"{cell}: too extreme for an answer that is certain to a part in "
                "10,000, in seconds.",
                remedy="Take an epsilon, delta, rate or number of steps less so.",
            ) from None
        finally:
            WORK.rest -= allowed - WORK.left
            WORK.left = math.inf
    return plain(values[where.ravel()].reshape(columns[0].shape))


def plain(values: NDArray) -> Any:
    """A number in the place of an array without axes."""
    return np.asarray(values).item() if np.ndim(values) == 0 else values


def checked(
    name: str,
    value: ArrayLike,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    whole: bool = False,
) -> NDArray:
    """``value`` as doubles, all of them in the range, or an error that says it."""
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
    good = np.isfinite(array) & (array > above) & (array >= at_least)
    good &= (array < below) & (array <= at_most)
    if whole:
        good &= array == np.floor(array)
    if not good.all():
        limits = [("above", above), ("at least", at_least)]
        limits += [("below", below), ("at most", at_most)]
        wanted = ["whole" if whole else "finite"]
        wanted += [
            f"{word} {limit:g}" for word, limit in limits if abs(limit) < math.inf
        ]
        raise Refused(
            f"{name} must be {' and '.join(wanted)}, not {array[~good].flat[0]:g}.",
            parameter=name,
        )
    return array
