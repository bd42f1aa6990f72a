"""Adaptive clipping, the criterion of Opacus's ``PrivacyEngineAdaptiveClipping``."""

from __future__ import annotations

from typing import Any, Callable

import torch
from opacus.utils import adaptive_clipping as stock

from opacus_ext.clipping import CLIPPINGS
from opacus_ext.grad_sample.modes.ghost import ClippedCriterion
from opacus_ext.refused import Refused

T = torch.Tensor


class AdaptiveCriterion(ClippedCriterion):
    """
    A criterion whose losses are clipped at a bound that moves with each batch, by
    Opacus's own formula.

    Args:
        given: Opacus's criterion, which clips the mean of the losses, not each loss
    """

    def __init__(self, given: stock.DPLossFastGradientAdaptiveClipping):
        optimizer: Any = given.optimizer
        parts = given.module, optimizer, given.criterion, given.loss_reduction
        super().__init__(*parts)
        # Opacus has the formula in its class of losses.
        formula = stock.DPTensorFastGradientAdaptiveClipping(
            given.module,
            optimizer,
            torch.zeros(0),
            given.loss_reduction,
            given.target_unclipped_quantile,
            given.min_clipbound,
            given.max_clipbound,
            given.clipbound_learning_rate,
            given.initial_noise_multiplier,
        )

        def adapt(norms: T) -> float:
            # A scheduler may have changed it, and it is the one that is accounted.
            formula.initial_noise_multiplier = float(optimizer.noise_multiplier)
            bound, noise_multiplier = formula._update_clip_and_noise(norms)
            given.module.max_grad_norm = optimizer.max_grad_norm = bound
            # The noise multiplier that is accounted pays for the count, too.
            optimizer._adjusted_noise_multiplier = noise_multiplier
            return bound

        optimizer.clipping = AdaptiveClipping(adapt)


class AdaptiveClipping:
    """
    A kind of clipping whose bound moves, in the place of a
    :class:`~opacus_ext.clipping.Clipping`.

    Args:
        adapt: sets a new bound, given the norms ``[B]`` of a batch, and returns it
    """

    name, per_parameter = "adaptive", False

    def __init__(self, adapt: Callable[[T], float]):
        self.adapt = adapt

    def at(self, bound: float) -> AdaptiveFunction:
        """Returns the clipping function of one backward pass, given the bound so far"""
        return AdaptiveFunction(self.adapt, bound)


class AdaptiveFunction:
    """Flat clipping at a bound that is known once the norms of the batch are."""

    per_parameter = False

    def __init__(self, adapt: Callable[[T], float], bound: float):
        self.adapt, self.was_called = adapt, False
        self.flat = CLIPPINGS["flat"].at(bound)

    def __call__(self, norms: T) -> T:
        """Adapts the bound, and returns the factors of gradients with these norms."""
        if self.was_called:
            raise Refused(
                "Samples of one batch run in several groups, or one by one, and the "
                "bound of adaptive clipping takes the norms of all of them.",
                parameter="grad_sample_mode",
                remedy='Use opacus.PrivacyEngine, or grad_sample_mode="hooks" with '
                'clipping="adaptive".',
            )
        self.was_called = True
        self.flat = CLIPPINGS["flat"].at(self.adapt(norms))
        return self.flat(norms)

    def sensitivity(self, relation: Any = "add_or_remove_one") -> float:
        """See :class:`~opacus_ext.clipping.ClippingFunction`."""
        return self.flat.sensitivity(relation)
