"""
The privacy cost of cutting Poisson batches to a maximum size.

Truncated Poisson sampling draws every record with probability q, and of a draw of more
than B records a random subset of B is taken.

**Claim.** Let D be a data set of n records and D+ the same with one more, x. The output
of a step on D+ and D is dominated by that of a mechanism which says whether a coin of
probability ``p = P[Binomial(n, q) >= B]`` fell, and then gives, of D+ and D,

- without the coin ``(1 - q) N(0, s^2) + q N(1, s^2)`` and ``N(0, s^2)``, as Poisson
  sampling does, s being the noise multiplier,
- with it ``(1 - q) N(0, s^2) + q N(2, s^2)`` and ``N(0, s^2)``.

**Proof.** The draw S from D is the same for both. Let it be known: by joint convexity
the divergence is at most the mean over S. Of less than B records nothing is cut, with x
or without: the first pair. Of B or more, D gives a random subset U of B of them. D+
gives the same, but that with probability ``q B / (|S| + 1) <= q`` x was drawn and kept,
beside a random subset of B - 1. Let that be U without a random one of its records: x is
in its place, so the sum of clipped gradients moves by twice the bound at most. By joint
convexity again, and as the divergence grows with the probability of x, this is
dominated by the second pair, which dominates the first. So |S| matters only by the
probability that it is B or more, which grows with n. Dominating pairs compose (Zhu,
Dong and Wang, 2022, theorem 10).

dp_accounting counts the exchange in a like way (arXiv 2508.15089). The older bound, of
JAX-Privacy and Chua et al., "Scalable DP-SGD: shuffling vs. Poisson subsampling"
(2024), compares the outputs of all T steps with those of Poisson sampling and adds
``T (1 + exp(epsilon)) P[Binomial(n + 1, q) > B]`` to delta, and so is infinite where
that is all of delta.
"""

from __future__ import annotations


def cut_probability(sample_rate: float, records: float, max_batch_size: float) -> float:
    """Returns the coin's p: the probability that a draw fills a batch."""
    from scipy.stats import binom  # takes half a second to import

    return float(binom.sf(max_batch_size - 1, records, sample_rate))


def kept_rate(sample_rate: float, records: float, max_batch_size: float) -> float:
    """
    Returns the probability that a record is in a batch after cutting. A record that
    alone has a gradient is protected no better than by Poisson sampling at this rate,
    which gives a lower bound.
    """
    from scipy.stats import binom

    others = float(binom.cdf(max_batch_size - 1, records - 1, sample_rate))
    cut = float(binom.sf(max_batch_size, records, sample_rate))
    return sample_rate * others + max_batch_size / records * cut
