"""Lower bounds of epsilon from an attacker's guesses about known coins.

A *trade-off function* ``f`` states a claim: whoever tells two neighboring data sets
apart with a rate ``a`` of false alarms misses at least a share ``f(a)`` of the members
(Dong, Roth and Su, 2022); here f is symmetric, convex and decreasing. With probability
``confidence`` or more, a mechanism that keeps its claim is not refuted.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect
from scipy.special import ndtr, ndtri
from scipy.stats import beta

from opacus_ext.accountants.composition import Composition
from opacus_ext.refused import Refused

TradeOff = Callable[[float], float]


def gaussian_tradeoff(mu: float) -> TradeOff:
    """The Gaussian mechanism's, of noise ``1 / mu`` (Dong et al., 2022, def. 2.6)."""
    return lambda a: float(ndtr(-ndtri(a) - mu))


def approximate_tradeoff(epsilon: float, delta: float) -> TradeOff:
    """The claim of (epsilon, delta)-DP (Dong et al., 2022, proposition 2.5)."""
    up = math.exp(epsilon)
    return lambda a: max(0.0, 1 - delta - up * a, (1 - delta - a) / up)


def accounted_tradeoff(accountant: Any) -> TradeOff:
    """The claim of an accountant: 24 pairs (epsilon, delta), which hold at once."""
    deltas = ndtr(np.linspace(ndtri(1e-8), ndtri(0.9), 24)).tolist()
    found = [min(700.0, accountant.get_epsilon(delta=delta)) for delta in deltas]
    claims = [approximate_tradeoff(*pair) for pair in zip(found, deltas)]
    return lambda a: max(claim(a) for claim in claims)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The Gaussian mechanism's epsilon at noise ``1 / mu``, at most 1 % too small."""
    spent = Composition()
    spent.history = [(1 / mu, 1.0, 1)] if mu > 0 else []
    return spent.get_bounds(delta).lower


class Rates(NamedTuple):
    """A lower bound of the rate of true alarms, and an upper one for false alarms."""

    hits: Any
    alarms: Any

    def epsilon(self, delta: float) -> float:
        """
        The least epsilon with ``hits <= e^epsilon alarms + delta`` and ``1 - alarms <=
        e^epsilon (1 - hits) + delta``. Source: Kairouz, Oh and Viswanath, 2015.
        """
        up = self.hits - delta, self.alarms
        down = 1 - self.alarms - delta, 1 - self.hits
        return max([0.0, *(math.log(a / b) for a, b in (up, down) if a > 0 and b > 0)])

    def mu(self) -> Any:
        """The least mu >= 0 whose Gaussian trade-off allows these rates."""
        return np.maximum(0.0, ndtri(self.hits) - ndtri(self.alarms))

    def refute(self, claim: TradeOff) -> bool:
        """True if no mechanism with this claim has such rates."""
        return 1 - self.hits < claim(self.alarms)


def at_least(alarms: ArrayLike, runs: int, error: float) -> Any:
    """
    A lower bound of the rate of alarms, given their number or numbers in ``runs`` runs,
    that is wrong with probability at most ``error`` (Clopper and Pearson, 1934).
    """
    some = np.maximum(alarms, 1)
    return np.where(np.equal(alarms, 0), 0.0, beta.ppf(error, some, runs - some + 1))


def repeated_runs(inside: Any, outside: Any, confidence: float = 0.95) -> Rates:
    """
    Bounds of the rates of an attack that raises an alarm if a score reaches a
    threshold. Half of the runs of each kind choose the threshold, that of the greatest
    mu. The other half count alarms, since the runs that chose would look too good. Runs
    may have different canaries: counts of alarms with unequal probabilities spread no
    more than with equal ones (Hoeffding, 1956). Source: Jagielski, Ullman and Oprea,
    2020; mu after Nasr et al., 2023.

    Args:
        inside, outside: scores ``[n]`` of independent runs with the canary, and without

    Raises:
        Refused: for fewer than 4 runs of a kind

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(2, 2000))
        >>> found = repeated_runs(noise[0] + 1, noise[1])
        >>> f"{found.mu():.2f}", found.refute(gaussian_tradeoff(0.5))
        ('0.73', True)
    """
    if min(np.size(inside), np.size(outside)) < 4:
        what = f"{np.size(inside)} runs with the canary, {np.size(outside)} without."
        raise Refused(what, remedy="Some hundred of each kind tell something.")
    pilots, tests = zip(*(np.array_split(x, 2) for x in (inside, outside)))

    def bounds(runs: Any, thresholds: Any) -> Rates:
        hits, alarms = (np.greater_equal.outer(x, thresholds).sum(0) for x in runs)
        inside, outside = map(len, runs)
        quiet = at_least(outside - alarms, outside, (1 - confidence) / 2)
        return Rates(at_least(hits, inside, (1 - confidence) / 2), 1 - quiet)

    thresholds = np.unique(np.concatenate(pilots))
    best = thresholds[np.argmax(bounds(pilots, thresholds).mu())]
    return Rates(*map(float, bounds(tests, best)))


def guess(scores: ArrayLike, included: ArrayLike, guesses: int) -> int:
    """
    The number of right guesses: "in the data" for the highest scores, and as often "not
    in the data" for the lowest.

    Args:
        scores: ``[m]``, computed from what was released and nothing else
        included: the coins ``[m]``
        guesses: their number, at most m, chosen before the run
    """
    coins = np.asarray(included, bool)[np.argsort(np.asarray(scores), kind="stable")]
    low, high = coins[: guesses // 2], coins[len(coins) - (guesses + 1) // 2 :]
    return int((~low).sum() + high.sum())


def f_dp_p_value(claim: TradeOff, canaries: int, guesses: int, correct: int) -> float:
    """
    An upper bound of the probability of so many correct guesses under a claimed
    trade-off ``f``. A fair coin for each of m canaries decides if it is in the data; an
    attacker who sees the release guesses r of the coins, with r fixed before. Let
    ``P_i`` be the probability that at least i guesses are right, and A the sum of
    ``P_j`` over j > i. Then

        P_i  >=  (m f(1 - (i P_(i+1) + A) / m) + A) / (r - i).

    Begun at ``P_v = t`` this gives the least ``P_0``; if that is above 1, t is refuted.
    The least such t is returned, to a relative 1e-3. ``docs/how-to/audit.md`` has the
    proof. Source: Mahloujifar, Melis and Chaudhuri, 2024: their recursion (with
    abstention), written for ``P_i``.

    Raises:
        Refused: unless 0 <= correct <= guesses <= canaries
    """
    if not 0 <= correct <= guesses <= canaries:
        what = f"{correct} right of {guesses} guesses about {canaries} canaries"
        raise Refused(f"{what} can't be.", parameter="correct")

    def refuted(tail: float) -> bool:
        last, total = tail, tail  # P_(i + 1) and A
        for i in range(correct - 1, -1, -1):
            least = claim(1 - min(1.0, (i * last + total) / canaries))
            last = max(last, (canaries * least + total) / (guesses - i))
            total += last
            if last > 1:
                return True
        return False

    if not refuted(1.0):
        return 1.0
    if refuted(1e-12):
        return 1e-12
    least = bisect(lambda x: refuted(math.exp(x)) - 0.5, math.log(1e-12), 0, xtol=1e-3)
    return min(1.0, math.exp(least + 1e-3))


def epsilon_one_run(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """
    The greatest epsilon at ``delta`` that :func:`f_dp_p_value` refutes, to 1e-3; 0 if
    it refutes none. It holds for any mechanism.
    """

    def excess(epsilon: float) -> float:
        claim = approximate_tradeoff(epsilon, delta)
        return f_dp_p_value(claim, canaries, guesses, correct) - (1 - confidence)

    return 0.0 if excess(0.0) > 0 else max(0.0, bisect(excess, 0, 64, xtol=1e-3) - 1e-3)
