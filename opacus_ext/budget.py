"""The noise of a run, chosen for a budget."""

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
from opacus.accountants.accountant import IAccountant

from opacus_ext.accountants import calibration, noise_left
from opacus_ext.accountants.prv import PRVBoundsAccountant
from opacus_ext.data.sampling import Sampling
from opacus_ext.refused import Refused
from opacus_ext.strategies import Strategy
from opacus_ext.strategies.banded import Banded, choose_bands


def noise_of_run(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
    strategy: Optional[Strategy] = None,
) -> float:
    """
    The noise multiplier of a run on so many records, for a budget of which the
    accountant's history is a part. ``strategy`` is that of correlated noise.

    Raises:
        Refused: if nothing is left of the budget, and for more steps than correlated
            noise is planned for
    """
    sampling.check(records)
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)
    if strategy is not None and not strategy.is_banded:
        check_planned(strategy, steps)

    def account(trial: IAccountant, noise_multiplier: float) -> None:
        """Adds the run to a trial."""
        sampling.account(trial, records, noise_multiplier, steps, strategy)

    return noise_left(accountant, epsilon, delta, record=account)


def check_planned(strategy: Strategy, steps: int) -> None:
    """Refuses a run of more steps than correlated noise is planned for."""
    if steps > strategy.steps:
        raise Refused(
            f"{strategy} is planned for {strategy.steps} steps, and the run has "
            f"{steps}.",
            parameter="noise",
            remedy=f"Give it steps={steps}, or fewer epochs.",
        )


def banded(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    optimizer: torch.optim.Optimizer,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
) -> Banded:
    """
    The best correlated noise for a run, see :func:`choose_bands`. The arguments are
    those of :func:`noise_of_run` for the same run with Poisson sampling; the optimizer
    tells its momentum, or the first beta of Adam and its like.
    """
    groups = optimizer.param_groups
    found = [g.get("momentum", g.get("betas", (0.0,))[0]) for g in groups]
    momentum = max((float(m) for m in found if 0 <= m < 1), default=0.0)
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)
    rate = sampling.rate(records)
    if len(accountant):  # the epsilon that a run alone may spend
        if not isinstance(accountant, PRVBoundsAccountant):  # a quick one
            accountant, before = PRVBoundsAccountant(), accountant.history
            accountant.history = list(before)
        noise = noise_of_run(
            sampling, accountant, records, epsilon=epsilon, delta=delta, epochs=epochs
        )
        alone = PRVBoundsAccountant()
        alone.history = [(noise, rate, steps)]
        epsilon = alone.get_epsilon(delta)
    noises = functools.partial(calibration.noise_multiplier, epsilon, delta)
    return choose_bands(noises, rate, steps, momentum)
