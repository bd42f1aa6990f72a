"""Lower bounds of epsilon from an attacker's guesses about known coins.

A *trade-off function* ``f`` states a claim: whoever tells two neighboring data sets
apart with a rate ``a`` of false alarms misses at least a share ``f(a)`` of the members
(Dong, Roth and Su, 2022); here f is symmetric, convex and decreasing. With probability
``confidence`` or more, a mechanism that keeps its claim is not refuted.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect
from scipy.special import ndtr, ndtri

from opacus_ext.accountants.composition import Composition
from opacus_ext.refused import Refused

TradeOff = Callable[[float], float]


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

    Args:
        canaries: number of fair coins
        guesses: number of coins that were guessed
        correct: number of right guesses
        delta: of the claim
        confidence: of the bound

    Example:
        >>> epsilon_one_run(canaries=1000, guesses=200, correct=190, delta=1e-5) > 1.5
        True
    """

    def excess(epsilon: float) -> float:
        claim = approximate_tradeoff(epsilon, delta)
        return f_dp_p_value(claim, canaries, guesses, correct) - (1 - confidence)

    return 0.0 if excess(0.0) > 0 else max(0.0, bisect(excess, 0, 64, xtol=1e-3) - 1e-3)
