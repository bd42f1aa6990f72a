"""Opacus's accountants where their answer is no bound, or no answer."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants import GaussianAccountant, PRVAccountant
from opacus.accountants.analysis import gdp

from opacus_ext.accountants.composition import Composition
from opacus_ext.refused import Refused


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
    """Opacus's accountant "gdp", which says in words where it has no answer."""

    def get_epsilon(self, delta: float, poisson: bool = True, **others: Any) -> float:
        """
        Returns Opacus's approximation of epsilon, which is no bound.

        Raises:
            Refused: for an epsilon above 500, where Opacus's search ends
        """
        if not self.history[-1][0]:
            return math.inf
        try:
            return super().get_epsilon(delta, poisson, **others)
        except (ValueError, OverflowError) as error:
            noise, rate, steps = self.history[-1]
            mean = gdp.compute_mu_poisson if poisson else gdp.compute_mu_uniform
            mu = float(mean(steps=steps, noise_multiplier=noise, sample_rate=rate))
            if not mu or gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
                return 0.0
            raise Refused(
                f'The accountant "gdp" has no epsilon at delta={delta:g} for noise '
                f"{noise:g}, rate {rate:g} and {steps} steps: it would be above 500.",
                parameter="accountant",
                remedy='Take PrivacyEngine(accountant="prv_bounds"), whose epsilon is '
                "an upper bound.",
            ) from error
