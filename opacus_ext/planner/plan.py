"""A plan: a configuration, what is expected of it, and how to train it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Dict, List, Optional, Tuple

from opacus_ext.planner.budget import Budget
from opacus_ext.planner.noise import verified_noise


@dataclass(frozen=True)
class Plan:
    """
    A configuration, and what is expected of it.

    Attributes:
        parameters: M
        batch_size: B
        steps: T
        examples: to train on, a multiple of B: Opacus makes as many batches an epoch
            as a loader has, and samples at that rate
        flops: C = 6 M B T S
        tokens_per_parameter: B T S / M
        noise_multiplier: sigma, relative to the bound of a clipped gradient
        ratio: the noise-batch ratio, sigma / B
        amplified: whether batches are Poisson samples; if not, fixed batches of every
            epoch, whose noise is lower here
        noise_norm: of the noise in the mean gradient, whose own is at most 1
        loss: in nats a token; of a law that is not private, a lower bound, and inf
            where there is too much noise for it to mean anything
        private_law: whether ``loss`` was fitted to private training
        advantage: of membership inference at most, delta at epsilon 0
        learning_rate: None where the law does not know
        seconds: on the probed machine; None without a probe
        interval: of the loss, 95 %; None where the law does not know
        budget: what it was planned for
    """

    parameters: int
    batch_size: int
    steps: int
    examples: int
    flops: float
    tokens_per_parameter: float
    noise_multiplier: float
    ratio: float
    noise_norm: float
    amplified: bool
    loss: float
    private_law: bool
    advantage: float
    learning_rate: Optional[float]
    seconds: Optional[float]
    interval: Optional[Tuple[float, float]]
    budget: Budget

    def arguments(self) -> Dict[str, Any]:
        """
        For ``PrivacyEngine(accountant="prv_bounds").make_private``, beside module,
        optimizer, criterion and a loader of ``examples`` with batches of
        ``batch_size``.

        The noise of Poisson samples of users is checked by the accountant, whose upper
        bound is no more than epsilon, and raised a little if it must be. See
        :meth:`notes` for what the engine's own epsilon means.
        """
        return dict(self._make_private)

    @cached_property
    def _make_private(self) -> Dict[str, Any]:
        noise = self.noise_multiplier
        if self.amplified and self.budget.sampling == "users":
            noise = verified_noise(
                noise,
                self.batch_size / self.examples,
                self.steps,
                self.budget.epsilon,
                self.budget.delta,
            )
        return dict(
            noise_multiplier=noise,
            # As measured: gradients brought to norm 1, whatever they were.
            max_grad_norm=0.1,
            clipping="normalised",
            grad_sample_mode="ghost_bk",
            poisson_sampling=self.amplified,
        )

    def notes(self) -> List[str]:
        """What must hold for epsilon to be that of the budget, for people."""
        budget, found = self.budget, []
        if not self.amplified:
            found.append(
                f"Batches are fixed: epsilon {budget.epsilon:g} is that of each example"
                " once an epoch. The engine counts Poisson samples: its get_epsilon "
                "does not hold here. Keep the batches whole (shuffle, drop_last)."
            )
        if budget.sampling == "records":
            found.append(
                f"Epsilon {budget.epsilon:g} is of a user with all of "
                f"{budget.records_per_user} records; the engine's get_epsilon is of "
                "one record."
            )
        elif budget.records_per_user > 1:
            found.append(
                "An item of the data set must be a user, and give one of their "
                "records, drawn anew each time."
            )
        return found

    def code(self) -> str:
        """What to paste: the data, the engine, and :meth:`arguments`."""
        settings = [
            f"    {name}={value!r}," for name, value in self.arguments().items()
        ]
        return "\n".join(
            [
                *(f"# {note}" for note in self.notes()),
                f"examples = Subset(dataset, range({self.examples}))",
                f"loader = DataLoader(examples, batch_size={self.batch_size})"
                f"  # {self.steps} steps in all",
                'engine = PrivacyEngine(accountant="prv_bounds")',
                "model, optimizer, criterion, loader = engine.make_private(",
                "    module=model,",
                "    optimizer=optimizer,",
                "    criterion=criterion,",
                "    data_loader=loader,",
                *settings,
                ")",
            ]
        )

    def as_dict(self) -> Dict[str, Any]:
        """For JSON; what is unlimited is None."""
        found = asdict(self)
        found["budget"] = {
            k: None if v == math.inf else v for k, v in found["budget"].items()
        }
        found["make_private"] = self.arguments()
        found["notes"] = self.notes()
        return found
