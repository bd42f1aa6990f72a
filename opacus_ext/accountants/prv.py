"""An accountant with a lower bound, an estimate and an upper bound."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from opacus.accountants.accountant import IAccountant

from opacus_ext.accountants.composition import Composition, check_step
from opacus_ext.accountants.mechanisms import MECHANISMS, count_of
from opacus_ext.refused import Refused
from opacus_ext.tables import in_a_line

# Checkpoints hold them.
torch.serialization.add_safe_globals([*MECHANISMS])


class PRVBoundsAccountant(Composition, IAccountant):
    """
    Epsilon and delta with bounds on both sides: ``PrivacyEngine(accountant=
    "prv_bounds")``.

    The guarantee is the upper bound. It is not above the bound of Renyi accounting
    (RDP), to four digits, and equals it where no grid serves: for an epsilon above
    10,000, and for a delta that drowns in rounding (below about 1e-18 times the steps
    where ``numpy.longdouble`` has 64 bits of precision, 1e-15 times them where it has
    53). The lower bound is 0 there. Source: Gopi, Lee and Wutschitz, 2021;
    :mod:`opacus_ext.accountants.numerical` lists the differences.

    Neighbors are data sets that differ by one record more or less, in batches that are
    drawn by Poisson sampling. The losses are those of a removal, as in Opacus. Those of
    an addition differ wherever the sampling rate is below 1; epsilon was no greater in
    any of 59 random settings. That this is so for every composition is not proven.
    Batches that are drawn otherwise (:mod:`opacus_ext.data`) are entries of their own
    kinds; beside these, the larger epsilon of removals and additions is taken.

    ``history`` is Opacus's list of (noise_multiplier, sample_rate, steps); a release
    with Gaussian noise beside the training is a step of rate 1. Up to 64 distinct pairs
    of noise and rate are composed exactly. More are rounded before, to less noise for
    the upper bound and to more for the lower.

    Example:
        >>> accountant = PRVBoundsAccountant()
        >>> for _ in range(1000):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> accountant.step(noise_multiplier=10.0, sample_rate=1.0)
        >>> [f"{x:.2f}" for x in accountant.get_bounds(delta=1e-5)]
        ['1.85', '1.87', '1.87']
        >>> f"{accountant.get_delta(epsilon=0.0).upper:.3f}"
        '0.166'
    """

    def __repr__(self) -> str:
        steps = count_of(self.history)
        if len(self.history) != 1:
            return in_a_line(self, steps=steps, phases=len(self.history))
        noise, rate, _ = self.history[0]
        return in_a_line(
            self, steps=steps, noise_multiplier=float(noise), sample_rate=float(rate)
        )

    @classmethod
    def mechanism(cls) -> str:
        return "prv_bounds"

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """
        Returns what counts the steps of an optimizer, as in Opacus. Backward passes
        that add up in a step are counted as larger batches, of all records at most.
        """

        def count(optimizer: Any) -> None:
            self.step(
                noise_multiplier=optimizer.noise_multiplier,
                sample_rate=min(1.0, sample_rate * optimizer.accumulated_iterations),
            )

        return count

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """
        Raises:
            Refused: if it is not of this accountant; nothing is changed then
        """
        trial = PRVBoundsAccountant()
        super(PRVBoundsAccountant, trial).load_state_dict(state_dict)
        if state_dict.get("mechanisms"):
            raise Refused(
                f"The state has releases of other kinds, {state_dict['mechanisms']}, "
                "which this version does not compose.",
                remedy="Compose them by dp-accounting.",
            )
        self.history = [check_step(*entry) for entry in state_dict["history"]]
