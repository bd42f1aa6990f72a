"""The search for the least noise of a budget, cell by cell."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from opacus_ext.accountants.composition import Composition
from opacus_ext.accountants.profiles import gaussian_sensitivity, unsampled_epsilon
from opacus_ext.planner.privacy_loss import SampledGaussian, TooHardError
from opacus_ext.planner.saddle_point import log_delta_of_steps, sampled_ever
from opacus_ext.planner.solver import (
    Guess,
    check_budget,
    excess_of,
    log_target,
    root,
    surely,
)


class NoiseSearch:
    """The noise of one cell after another, each found from the one before."""

    def __init__(self, rough: bool = False) -> None:
        self.guess, self.rough = Guess(), rough

    def __call__(
        self, epsilon: float, delta: float, k: float, steps: float, q: float
    ) -> float:
        # a hair's breadth: the rounding of a rate that is delta
        if sampled_ever(q, steps * k) <= delta * (1 + 1e-12):
            return 0.0
        log_delta = log_target(delta)
        if q == 1:
            mu = float(gaussian_sensitivity(epsilon, log_delta))
            return k * math.sqrt(steps) / mu
        if steps == k == 1:
            alone = unsampled_epsilon(epsilon, q)
            return 1 / float(gaussian_sensitivity(alone, log_delta - math.log(q)))
        try:
            return surely(
                lambda fineness: self._search(epsilon, delta, k, steps, q, fineness)
            )
        except TooHardError:
            if self.rough:
                raise
            return by_the_accountant(epsilon, delta, k, steps, q)

    def _search(
        self,
        epsilon: float,
        delta: float,
        k: float,
        steps: float,
        q: float,
        fineness: float,
    ) -> float:
        guess = self.guess
        if fineness > 1:
            guess.forget()

        def profile(log_noise: float) -> float:
            step = SampledGaussian(math.exp(log_noise), q, int(k))
            value, guess.tilt = log_delta_of_steps(
                step, steps, epsilon, guess.tilt, fineness
            )
            return value

        excess = excess_of(profile, log_target(delta))
        start = guess.start(epsilon, delta, k, steps, q)
        tolerance = 3e-3 if self.rough else 3e-6
        log_noise, guess.slope = root(excess, start, guess.slope, tolerance)
        noise = math.exp(log_noise)
        if not self.rough:
            check_budget(
                SampledGaussian(noise, q, int(k)), steps, epsilon, delta, guess.tilt
            )
        guess.correct(log_noise)
        return noise


def by_the_accountant(
    epsilon: float, delta: float, k: float, steps: float, q: float
) -> float:
    """Seconds a cell: noise at which the accountant's upper bound is ``epsilon``."""
    if k > 1 or epsilon > 100:  # its grid would be too large
        raise TooHardError
    accountant = Composition()

    def excess(log_noise: float) -> float:
        accountant.history = [(math.exp(log_noise), q, int(steps))]
        with np.errstate(over="ignore"):  # of a delta that is hardly a number
            return math.log(max(accountant.get_epsilon(delta), 1e-12) / epsilon)

    low = high = start = Guess().start(epsilon, delta, k, steps, q)
    while excess(high) > 0:
        high += 0.5
        if high > start + 10:
            raise TooHardError
    while excess(low) <= 0:
        low -= 0.5
        if low < -20:
            raise TooHardError
    found = brentq(excess, low, high, xtol=2e-5)
    while excess(found) > 0:  # brentq may end on either side
        found += 2e-5
    return math.exp(found)
