"""
What training costs: device hours and money of a run, the privacy of a search.

Several trainings on the private data, of which the best model is kept, spend more than
one run: all trials composed, or, with random stopping (Papernot and Steinke 2022,
"Hyperparameter Tuning with Renyi Differential Privacy"), hardly more than one. A
trial's result includes its score, which must be private as well, or of public data.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Optional, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

from opacus_ext.accountants import calibration
from opacus_ext.accountants.saddle_point import PrivacyLoss, SampledGaussian
from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused


class Cost(NamedTuple):
    """Hours of all devices together, on the clock, and their price if it is known."""

    device_hours: float
    hours: float
    money: Optional[float]


@dataclass(frozen=True)
class Device:
    """
    The devices of a run.

    Attributes:
        flops: floating-point operations a second of one device, its peak
        utilization: the share of it that *private* training reaches: that of plain
            training, divided by how much longer a private step takes
        price: of an hour of one device; None if it is not known
        count: number of devices, which share the work evenly

    Raises:
        Refused: for numbers that are not positive and finite, and a utilization
            above 1

    Example:
        >>> Device(flops=3e14, utilization=0.4, price=2.5, count=8).cost(8.64e20)
        Cost(device_hours=2000.0, hours=250.0, money=5000.0)
    """

    flops: float
    utilization: float = 0.3
    price: Optional[float] = None
    count: int = 1

    def __post_init__(self) -> None:
        checked("utilization", self.utilization, above=0, at_most=1)
        for name in ("flops", "price", "count"):
            if getattr(self, name) is not None:
                checked(name, getattr(self, name), above=0)

    def work(self, hours: float) -> float:
        """The floating-point operations of all devices in so many hours."""
        return hours * 3600 * self.flops * self.utilization * self.count

    def cost(self, flops: float) -> Cost:
        """The cost of a run of so many floating-point operations."""
        hours = flops / (self.flops * self.utilization) / 3600
        money = None if self.price is None else hours * self.price
        return Cost(hours, hours / self.count, money)


#: Orders of Renyi divergence that are tried.
ORDERS = np.unique(
    np.concatenate(
        [1 + np.geomspace(0.05, 10, 40), np.arange(12, 64), 2.0 ** np.arange(6, 13)]
    )
)


def ways(
    epsilon: float, delta: float, steps: int, sample_rate: float, trials: int
) -> Sequence[Dict[str, Any]]:
    """Returns the ways to search, and a trial's noise; None where none is enough."""
    one = calibration.noise_multiplier(epsilon, delta, steps, sample_rate)
    every = calibration.noise_multiplier(epsilon, delta, steps * trials, sample_rate)

    def stopping(eta: float) -> Any:
        with suppress(Refused):
            return search_noise(epsilon, delta, steps, sample_rate, trials, eta)

    found = {
        "on public data": one,
        "random stopping, geometric": stopping(1.0),
        "random stopping, logarithmic": stopping(0.0),
        f"all {trials} composed": every,
    }
    return [
        dict(search=name, noise_multiplier=x, times=x / one if x and one else None)
        for name, x in found.items()
    ]


def search_noise(
    epsilon: float,
    delta: float,
    steps: int,
    sample_rate: float,
    trials: float,
    eta: float = 1.0,
) -> float:
    """
    Returns the noise multiplier of each trial, ``trials`` of them in the mean, with
    which a search with random stopping keeps to a budget.

    Args:
        epsilon, delta: budget of the search
        steps, sample_rate: those of a trial
        eta: 1 for a geometric number of trials, 0 for a logarithmic one

    Raises:
        Refused: for arguments out of range, and for a budget below the cost of the
            choice itself

    Example:
        >>> alone = calibration.noise_multiplier(4.0, 1e-6, 1000, 0.01)
        >>> noise = search_noise(4.0, 1e-6, 1000, 0.01, trials=20)
        >>> 1.2 < noise / alone < 2.5
        True
    """
    checked("epsilon", epsilon, above=0)
    checked("delta", delta, above=0, below=1)

    def excess(log_noise: float) -> float:
        rdp = renyi(ORDERS, math.exp(log_noise), sample_rate, steps)
        spent = epsilon_of(ORDERS, random_stopping(ORDERS, rdp, trials, eta), delta)
        return min(spent / epsilon, 1e6) - 1

    low, high = math.log(0.1), math.log(1e5)
    if excess(high) > 0:
        raise Refused(
            f"epsilon={epsilon:g} at delta={delta:g} is less than choosing the best of "
            f"{trials:g} trials costs, whatever their noise.",
            parameter="epsilon",
            remedy="Search among fewer trials, or on public data.",
        )
    if excess(low) <= 0:
        return math.exp(low)
    found = brentq(excess, low, high, xtol=1e-4)
    return math.exp(found + 1e-4)  # brentq may end on either side


def gamma_of(trials: float, eta: float) -> float:
    """
    Returns the gamma of Papernot and Steinke's truncated negative binomial distribution
    at which the mean is ``trials``, which must be more than 1: of the geometric
    distribution (eta 1) or the logarithmic one (0).
    """
    checked("trials", trials, above=1, at_most=1e100)
    if eta not in (0, 1):
        raise Refused(
            f"eta={eta:g} is neither geometric nor logarithmic.",
            parameter="eta",
            remedy="Pass 1 or 0.",
        )
    if eta == 1:
        return 1 / trials

    def excess(log: float) -> float:  # of log(1 / gamma)
        return math.log(math.expm1(log) / log / trials)

    return math.exp(-brentq(excess, 1e-9, 300, xtol=1e-13)) if excess(1e-9) < 0 else 1.0


def random_stopping(
    orders: NDArray, rdp: NDArray, trials: float, eta: float = 1.0
) -> NDArray:
    """
    Returns the Renyi divergence of the best of a truncated negative binomial number of
    trials (Papernot and Steinke, theorem 2), the least over all orders l' of

        rdp(l) + (1 + eta) (1 - 1 / l') rdp(l') + (1 + eta) log(1 / gamma) / l'
        + log E[K] / (l - 1),

    from that of one trial, ``[n]`` at orders above 1.
    """
    gamma = gamma_of(trials, eta)
    other = (1 - 1 / orders) * rdp + math.log(1 / gamma) / orders
    return rdp + (1 + eta) * other.min() + math.log(trials) / (orders - 1)


def epsilon_of(orders: NDArray, rdp: NDArray, delta: float) -> float:
    """
    Returns the epsilon of a Renyi divergence, the least over orders (Canonne, Kamath
    and Steinke 2020, proposition 12; as Opacus has it).
    """
    found = rdp + np.log1p(-1 / orders)
    found = found - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(float(np.min(found)), 0.0)


def renyi(
    orders: NDArray, noise_multiplier: float, sample_rate: float, steps: int
) -> NDArray:
    """
    Returns the Renyi divergence of steps of the sampled Gaussian mechanism, ``[n]``, at
    orders above 1 (Mironov, Talwar and Zhang 2019): by their sum for whole orders, by
    integration for others. Opacus's ``compute_rdp`` takes up to 60 times as long, and
    has nan from order 2,048 on.
    """
    s, q = noise_multiplier, sample_rate
    if q == 1:
        return steps * orders / (2 * s**2)
    moments = np.empty(len(orders))
    whole = orders == np.floor(orders)
    for i in np.flatnonzero(whole):
        j = np.arange(orders[i] + 1)
        k = orders[i] - j
        log_choices = gammaln(orders[i] + 1) - gammaln(j + 1) - gammaln(k + 1)
        log_weights = log_choices + j * math.log(q) + k * math.log1p(-q)
        moments[i] = logsumexp(log_weights + j * (j - 1) / (2 * s**2))
    if not whole.all():
        tilts = orders[~whole] - 1
        law = PrivacyLoss(SampledGaussian(s, q, 1), tilts.max() + 9 * s + 1, 1.0)
        moments[~whole] = [law.tilted(tilt)[2] for tilt in tilts]
    return steps * moments / (orders - 1)
