"""Opacus's accountants where their answer is no bound, or no answer."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants import GaussianAccountant, PRVAccountant
from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis import gdp

from opacus_ext.accountants.composition import Composition
from opacus_ext.refused import Refused, check_number


class BoundedPRVAccountant(PRVAccountant):
    """
    Opacus's accountant "prv", whose epsilon is the upper bound of "prv_bounds".

    Opacus's own upper bound leaves rounding out, so that it can be below the truth, and
    where epsilon is large it takes minutes, or more memory than there is. History and
    checkpoints are those of Opacus.
    """

    def get_epsilon(self, delta: float, **others: Any) -> float:
        """Returns an upper bound of epsilon. Other arguments of Opacus's are ignored"""
        steps = Composition()
        steps.history = list(self.history)
        return steps.get_epsilon(delta)


class SolvedGaussianAccountant(GaussianAccountant):
    """
    Opacus's accountant "gdp", which counts all entries of a history, and says in words
    where it has no answer. Opacus reads the last entry alone.
    """

    def get_epsilon(self, delta: float, poisson: bool = True, **others: Any) -> float:
        """
        Returns Opacus's approximation of epsilon, which is no bound: steps of other
        noise or rates add to the square of mu.

        Raises:
            Refused: for an epsilon above 500, where Opacus's search ends
        """
        check_number("delta", delta, below=1)
        if any(not noise for noise, *_ in self.history):
            return math.inf
        mean = gdp.compute_mu_poisson if poisson else gdp.compute_mu_uniform
        means = [
            float(mean(steps=steps, noise_multiplier=noise, sample_rate=rate))
            for noise, rate, steps in self.history
        ]
        mu = math.hypot(*means)
        if not mu or gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
            return 0.0
        try:
            return float(gdp.eps_from_mu(mu=mu, delta=delta))
        except (ValueError, OverflowError) as error:
            raise Refused(
                f'The accountant "gdp" has no epsilon at delta={delta:g} for the steps '
                f"{self.history}: it would be above 500.",
                parameter="accountant",
                remedy='Take PrivacyEngine(accountant="prv_bounds"), whose epsilon is '
                "an upper bound.",
            ) from error


_OURS = {
    PRVAccountant: BoundedPRVAccountant,
    GaussianAccountant: SolvedGaussianAccountant,
}


def in_place_of(accountant: IAccountant) -> IAccountant:
    """Returns one of these with the same history, in the place of Opacus's own."""
    kind = _OURS.get(type(accountant))
    if kind is None:
        return accountant
    ours = object.__new__(kind)  # Opacus's __init__ warns
    vars(ours).update(vars(accountant))
    return ours
