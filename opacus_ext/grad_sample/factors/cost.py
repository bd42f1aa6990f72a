"""
Which way to a norm is the cheapest.

Costs are multiply-adds a sample. The constants weigh in memory traffic: about 4 for an
entry in cache; 60 for one that is written, read twice and takes memory. They were set
by timing on CPU; only speed depends on them.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

from opacus_ext.grad_sample.factors.rows import OneHot, dtype_of, product
from opacus_ext.grad_sample.factors.settings import workspace

_FEW = 2**23  # multiply-adds that take no longer than sorting rows by index


def by_segments(term: Any) -> bool:
    """
    Whether rows of equal index are summed: only one-hot factors, or one dense, and so
    many rows that sorting them takes less than to let all meet.
    """
    return bool(term.onehot) and len(term.dense) <= 1 and term.length > 32


def of_grams(terms: Sequence[Any]) -> float:
    """Of the squared norm by Gram matrices of the terms, and of each two of them."""
    if len({t.widths for t in terms}) > 1:
        return math.inf
    cost = 0.0
    for i, u in enumerate(terms):
        widths = sum(f.shape[2] for f in u.dense)
        if by_segments(u):
            cost += u.length * (16 + widths)
        else:  # one triangle and the diagonal blocks
            cost += 0.65 * u.length**2 * (8 + widths)
        for v in terms[:i]:
            both = [
                f.shape[2]
                for f, g in zip(u.factors, v.factors)
                if not isinstance(f, OneHot) and not isinstance(g, OneHot)
            ]
            cost += u.length * v.length * (8 * len(u.factors) + sum(both))
    return cost


def of_blocks(terms: Sequence[Any]) -> float:
    """Of the squared norm by gradients that are materialized block by block."""
    numel = product(terms[0].widths)
    cost = 4.0 * numel
    for t in terms:
        if t.onehot:
            cost += 2 * numel + t.length * product(f.shape[2] for f in t.dense)
        else:
            cost += t.length * numel
    return cost


def worth_caching(terms: Sequence[Any], cache: int, cost: float) -> bool:
    """
    Whether gradients are materialized for their norm and cached for the clipped sum.

    Args:
        cache: bytes that may be spent
        cost: of the norm in another way
    """
    if any(t.onehot and len(t.dense) > 1 for t in terms):
        return False
    if all(len(t.dense) < 2 for t in terms):
        return False  # nothing to gain
    numel = product(terms[0].widths)
    size = terms[0].batch_size * numel * dtype_of(*(t.dtype for t in terms)).itemsize
    return size <= cache and 60 * numel <= cost


def few(term: Any) -> bool:
    """Whether rows are so few that all of a sample may meet, and most in vain."""
    width = 64 + sum(f.shape[2] for f in term.dense)  # 64: passes over the product
    size = term.batch_size * term.length**2
    return size * width <= _FEW and 3 * size * term.dtype.itemsize <= workspace()
