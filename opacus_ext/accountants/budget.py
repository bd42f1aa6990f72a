"""Noise for the rest of a privacy budget."""

from __future__ import annotations

from copy import deepcopy
from typing import Callable

from opacus.accountants.accountant import IAccountant

from opacus_ext.progress import progress
from opacus_ext.refused import Refused


def noise_left(
    accountant: IAccountant,
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
) -> float:
    """
    Returns the noise multiplier of a run that spends the rest of a budget, but for 0.01
    of epsilon.

    Args:
        accountant: of the releases before the run; is not changed
        epsilon, delta: of the whole budget
        sample_rate, steps: of the run

    Raises:
        Refused: if nothing is left

    Example:
        >>> from opacus.accountants import RDPAccountant
        >>> accountant = RDPAccountant()
        >>> accountant.step(noise_multiplier=20.0, sample_rate=1.0)
        >>> f"{noise_left(accountant, 5.0, 1e-5, 0.1, 100):.2f}"
        '1.29'
    """
    before = list(accountant.history)

    def record(trial: IAccountant, noise: float) -> None:
        trial.history = [*before, (noise, sample_rate, steps)]

    return least_noise(accountant, record, epsilon, delta)


def least_noise(
    accountant: IAccountant,
    record: Callable[[IAccountant, float], None],
    epsilon: float,
    delta: float,
) -> float:
    """Returns :func:`noise_left` of any run, which ``record`` records at a noise."""

    def spent(noise: float) -> float:
        trial = deepcopy(accountant)  # with its state beside the history
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
            if (found := spent(middle)) <= epsilon:
                high, reached = middle, found
            else:
                low = middle
    return high
