"""Adaptive clipping: a bound that follows a quantile of the gradients' norms."""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence

import torch

from opacus_ext.refused import Refused, check_argument, check_number
from opacus_ext.tables import in_a_line

#: The name of ``make_private(clipping=...)``.
ADAPTIVE = "adaptive"
_MOST = 100.0  # change of the bound's logarithm, whose exponential is finite


class AdaptiveBound:
    r"""
    Moves the bound of an optimizer to a quantile of the norms of the samples' gradients
    (``clipping="adaptive"``), in any mode. All processes have the same bound.

    A logical batch of expected size m is clipped at the bound C. Then the fraction of
    samples with a norm of at most C is released with noise, ``f = (sum of (1 or 0, less
    1/2) + N(0, u^2)) / m + 1/2``, and the next batch is clipped at
    ``C exp(-learning_rate (f - quantile))``. Source: Andrew et al. 2021,
    "Differentially Private Learning with Adaptive Clipping", algorithm 1. Opacus
    divides by the number of samples that were drawn, which is private.

    Privacy. A record adds 1/2 or -1/2 to the sum, so its noise multiplier is 2 u. Let s
    be the noise multiplier that the accountant records. Gradients get the noise
    multiplier ``(s^-2 - (2 u)^-2)^(-1/2)``, so that both together are one Gaussian
    mechanism of noise multiplier s (theorem 1): epsilon is that of a fixed bound.

    Args:
        optimizer: a ClippingOptimizer that clips flat, and has the first bound
        target_unclipped_quantile: the fraction of samples that is not to be clipped,
            between 0 and 1
        clipbound_learning_rate: how fast the bound moves
        min_clipbound: the least bound
        max_clipbound: the largest bound
        unclipped_num_std: u; by default m / 20, or s if that is more

    Raises:
        Refused: for numbers that do not fit; nothing has changed then
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        min_clipbound: float = 1e-4,
        max_clipbound: float = 1e8,
        unclipped_num_std: Optional[float] = None,
    ):
        check_number("target_unclipped_quantile", target_unclipped_quantile, below=1)
        check_number("clipbound_learning_rate", clipbound_learning_rate)
        check_number("min_clipbound", min_clipbound)
        check_number("max_clipbound", max_clipbound)
        check_argument(
            "max_clipbound",
            max_clipbound,
            max_clipbound > min_clipbound,
            f"a number above min_clipbound, {min_clipbound}",
            "Give another one, or leave both out.",
        )
        if unclipped_num_std is not None:
            check_number("unclipped_num_std", unclipped_num_std)
        self.optimizer = optimizer
        self.quantile = float(target_unclipped_quantile)
        self.learning_rate = float(clipbound_learning_rate)
        self.least, self.most = float(min_clipbound), float(max_clipbound)
        self.unclipped_num_std = unclipped_num_std
        self.check_share()
        optimizer.observers += (self,)

    def __repr__(self) -> str:
        return in_a_line(
            self,
            bound=self.optimizer.max_grad_norm,
            target_unclipped_quantile=self.quantile,
            unclipped_num_std=self.count_std,
        )

    @property
    def batch_size(self) -> float:
        """The expected number of samples of a batch, over all processes."""
        optimizer = self.optimizer
        return float(
            optimizer.expected_batch_size * getattr(optimizer, "world_size", 1)
        )

    @property
    def count_std(self) -> float:
        """The standard deviation of the noise in the count."""
        if self.unclipped_num_std is not None:
            return float(self.unclipped_num_std)
        return max(self.batch_size / 20, float(self.optimizer.noise_multiplier))

    @property
    def share(self) -> float:
        """The count's share of each step's budget, between 0 and 1."""
        return (float(self.optimizer.noise_multiplier) / (2 * self.count_std)) ** 2

    def check_share(self) -> None:
        """Refuses a count that would take all of the budget."""
        noise_multiplier = float(self.optimizer.noise_multiplier)
        given = self.unclipped_num_std
        if given is not None and noise_multiplier >= 2 * given:
            raise Refused(
                f"unclipped_num_std={given} is at most half of the noise multiplier, "
                f"{noise_multiplier:g}: the count alone would spend the budget.",
                parameter="unclipped_num_std",
                remedy=f"Give {noise_multiplier:g} or more, or leave it out.",
            )

    def observe(self, norms: Sequence[Optional[torch.Tensor]]) -> None:
        """
        Moves the bound; the optimizer calls it after it added noise.

        Args:
            norms: norms of the samples' gradients, ``[B]`` for each physical batch
        """
        optimizer = self.optimizer
        bound = float(optimizer.max_grad_norm)
        count = torch.zeros(1, dtype=torch.float64, device=optimizer.params[0].device)
        for some in norms:
            if some is not None:  # a norm that is not finite counts as above
                count += ((some.detach() <= bound).double() - 0.5).sum()
        std = self.count_std if optimizer.noise_multiplier else 0.0
        expected = self.batch_size * optimizer.accumulated_iterations
        fraction = float(optimizer.release(count, 2 * std, 0.5)) / expected + 0.5
        change = -self.learning_rate * (fraction - self.quantile)
        moved = bound * math.exp(min(max(change, -_MOST), _MOST))
        self.set_bound(min(max(moved, self.least), self.most))

    def set_bound(self, bound: float) -> None:
        """Sets the bound of the next logical batch."""
        optimizer = self.optimizer
        optimizer.max_grad_norm = bound
        if hasattr(optimizer.mode, "max_grad_norm"):  # Opacus keeps it there, too
            optimizer.mode.max_grad_norm = bound


#: The arguments of ``make_private`` that it takes, by Opacus's names.
DEFAULTS = dict(AdaptiveBound.__init__.__kwdefaults__ or {})
