"""
What it costs to cut Poisson batches to a greatest size.

Truncated Poisson sampling draws every record with probability q, and of a draw of more
than B records a random subset of B is taken. It is accounted for as in JAX-Privacy and
in Chua et al., "Scalable DP-SGD: shuffling vs. Poisson subsampling" (2024), section 4.

**Claim.** Let T steps with Poisson sampling be (epsilon, delta)-private for adding or
removing a record, and let ``tau(n) = P[Binomial(n, q) > B]``. With truncation, T steps
on n records are (epsilon, delta')-private, for

    delta' = delta + T (1 + exp(epsilon)) tau(n + 1).

**Proof.** Draw with and without truncation from the same Poisson sample. A step's
outputs differ only if the sample has more than B records, of n with probability
tau(n), whatever earlier steps gave. So the outputs of all T steps differ with
probability T tau(n) at most. Let D and D' be neighbours of n and n' records. For any
event E, with M the Poisson mechanism and K the truncated one,

    P[K(D) in E] <= P[M(D) in E] + T tau(n)
                 <= exp(epsilon) P[M(D') in E] + delta + T tau(n)
                 <= exp(epsilon) (P[K(D') in E] + T tau(n')) + delta + T tau(n).

tau grows with n, and n and n' are at most n + 1. The same with M and K exchanged bounds
delta' from below.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

from scipy.stats import binom

from opacus_ext.accountants.prv import Bounds

_LEAST = 1e-300  # where the tail is too small for a number
_TRIALS = 40  # each sets a hundredth more aside, or much more


def tail(records: float, sample_rate: float, max_batch_size: float) -> float:
    """
    ``tau(n + 1)``: the probability that a draw is cut, with one record more.

    Example:
        >>> f"{tail(999, 0.1, 140):.3e}"
        '2.424e-05'
    """
    if max_batch_size >= records + 1:
        return 0.0
    return max(float(binom.sf(max_batch_size, records + 1, sample_rate)), _LEAST)


def extra_delta(tails: float, epsilon: float) -> float:
    """
    What truncation adds to delta.

    Args:
        tails: the sum of :func:`tail` over the steps
        epsilon: at which delta is meant
    """
    return tails * (1 + math.exp(min(epsilon, 700.0)))


def sufficient_batch_size(
    records: float, sample_rate: float, steps: float, epsilon: float, delta: float
) -> int:
    """
    The least ``max_batch_size`` with which truncation takes a hundredth of delta.

    Example:
        >>> sufficient_batch_size(60_000, 0.01, 10_000, epsilon=4.0, delta=1e-5)
        785
    """
    share = delta / 100 / steps / (1 + math.exp(min(epsilon, 600.0)))
    found = int(binom.isf(max(share, _LEAST), records + 1, sample_rate))
    while tail(records, sample_rate, found) > max(share, _LEAST):
        found += 1
    return found


def truncated_bounds(
    poisson: Callable[[float], Bounds], tails: float, delta: float
) -> Optional[Bounds]:
    """
    Bounds of epsilon with truncation.

    Any part of delta may be set aside for the truncation if it is found to be enough at
    the epsilon that the rest gives; the search sets aside more until it is.

    Args:
        poisson: bounds of epsilon by delta, without truncation
        tails: the sum of :func:`tail` over the steps
        delta: of the guarantee

    Returns:
        The bounds, or None if the truncation takes all of delta.
    """
    aside = 2.02 * tails
    for _ in range(_TRIALS):
        if aside >= delta:
            break
        found = poisson(delta - aside)
        needed = extra_delta(tails, found.upper)
        if needed <= aside:
            more = delta + aside
            lower = poisson(more).lower if more < 1 else 0.0
            return Bounds(lower, max(found.estimate, lower), found.upper)
        aside = 1.01 * needed
    return None
