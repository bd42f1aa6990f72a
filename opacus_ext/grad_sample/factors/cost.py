"""
Which way to a norm is the cheapest.

Costs are multiply-adds a sample. The constants weigh in memory traffic: about 4 for an
entry in cache; 60 for one that is written, read twice and takes memory. They were set
by timing on CPU; only speed depends on them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Sequence

import torch

from opacus_ext.grad_sample.factors.rows import OneHot, known
from opacus_ext.grad_sample.factors.settings import workspace
from opacus_ext.grad_sample.factors.term import dtype_of

if TYPE_CHECKING:
    from opacus_ext.grad_sample.factors.batched import Batched

_FEW = 2**23  # multiply-adds that take no longer than sorting rows by sample


def by_segments(term: Batched) -> bool:
    """Whether rows of equal index are summed: only one-hot factors, or one dense."""
    return bool(term.onehot) and len(term.dense) <= 1


def of_grams(terms: Sequence[Batched]) -> float:
    """Of the squared norm by Gram matrices of the terms, and of each two of them."""
    if len({t.widths for t in terms}) > 1:
        return math.inf
    cost = 0.0
    for i, u in enumerate(terms):
        if by_segments(u):
            cost += known(u.length) * (16 + sum(f.shape[2] for f in u.dense))
        else:  # one triangle and the diagonal blocks
            widths = sum(f.shape[2] for f in u.dense)
            cost += 0.65 * known(u.length) ** 2 * (8 + widths)
        for v in terms[:i]:
            both = [
                f.shape[2]
                for f, g in zip(u.factors, v.factors)
                if not isinstance(f, OneHot) and not isinstance(g, OneHot)
            ]
            pairs = known(u.length) * known(v.length)
            cost += pairs * (8 * len(u.factors) + sum(both))
    return cost


def of_blocks(terms: Sequence[Batched]) -> float:
    """Of the squared norm by gradients that are materialised block by block."""
    numel = known(math.prod(terms[0].widths))
    cost = 4.0 * numel
    for t in terms:
        if t.onehot:
            rows = math.prod(f.shape[2] for f in t.dense)
            cost += 2 * numel + known(t.length) * rows
        else:
            cost += known(t.length) * numel
    return cost


def worth_caching(terms: Sequence[Batched], cache: int, cost: float) -> bool:
    """
    Whether gradients are materialised for their norm and cached for the clipped sum.

    Args:
        cache: bytes that may be spent
        cost: of the norm in another way
    """
    if any(t.onehot and len(t.dense) > 1 for t in terms):
        return False
    if all(len(t.dense) < 2 for t in terms):
        return False  # nothing to gain
    numel, size = known(math.prod(terms[0].widths)), dtype_of(*terms).itemsize
    return known(terms[0].batch_size) * numel * size <= cache and 60 * numel <= cost


def few(dense: Sequence[torch.Tensor], rows: int, dtype: torch.dtype) -> bool:
    """Whether rows are so few that all of them may meet, and most in vain."""
    width = 64 + sum(f.shape[2] for f in dense)  # 64: the passes over the product
    size = 3 * rows**2 * dtype.itemsize
    return rows**2 * width <= _FEW and size <= workspace()
