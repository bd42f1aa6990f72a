"""Rows that meet by their place: those of one sample, and of one index if there is one.

A place is ``sample * size + index``, one for each row; ``size`` is the number of
indices, 1 where rows have none.
"""

from __future__ import annotations

import functools
from typing import Iterator, List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.factors.rows import OneHot, Size, square_sum

T = torch.Tensor
Runs = Tuple[T, T]

_LARGE = 128  # rows of a group that is a product of its own
_FEW_ROWS = 8  # of a group, below which groups are better taken together


def places_of(samples: T, onehot: Sequence[OneHot]) -> Tuple[T, int]:
    """
    Args:
        samples: of each row, ``[B, 1]`` or ``[1, rows]``
        onehot: the one-hot factors

    Returns:
        The place of each row, flattened, and ``size``.
    """
    index, size = onehot[0] if onehot else (0, 1)
    for other in onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    return (samples * size + index).flatten(), size


def square_of_sums(rows: T, places: T, size: int, batch_size: Size) -> T:
    """
    Rows of one place are summed, and the sums squared.

    Args:
        rows: ``[rows, width]``

    Returns:
        ``[B]``
    """
    # Numbers of the segments: as many as there are rows at most, so that nobody has to
    # know how many there are (which a device would have to be waited for).
    ranked, order = places.sort()
    new = torch.zeros_like(ranked)
    new[1:] = ranked[1:] != ranked[:-1]
    number = new.cumsum(0)
    segment = torch.empty_like(number).scatter_(0, order, number)
    squares = square_sum(torch.zeros_like(rows).index_add_(0, segment, rows))
    sample = torch.zeros_like(number).scatter_(0, number, ranked // size)
    return rows.new_zeros(batch_size).index_add_(0, sample, squares)


def square_of_few(dense: List[T], places: T, size: int, batch_size: Size) -> T:
    """
    All rows meet all rows, and those of one place count.

    Args:
        dense: factors ``[rows, width]``

    Returns:
        ``[B]``
    """
    product = functools.reduce(torch.mul, (f @ f.mT for f in dense))
    product = product.masked_fill_(places[:, None] != places, 0).sum(1)
    norm = product.new_zeros(batch_size)
    return norm.index_add_(0, places // size, product).clamp_(min=0)


def runs_of(places: T) -> Optional[Runs]:
    """
    Of rows that lie together by place the places and how many rows each has; None of
    others, and of many places.
    """
    keys, counts = places.unique_consecutive(return_counts=True)
    if len(places) < _FEW_ROWS * len(keys) or len(keys.unique()) < len(keys):
        return None
    return keys, counts


def square_of_runs(dense: List[T], runs: Runs, size: int, batch_size: Size) -> T:
    """
    Two dense factors, their rows together by place: no copies of them.

    Args:
        dense: ``[rows, width]``
    """
    (left, right), (keys, counts) = dense, runs
    numel = left.shape[1] * right.shape[1]
    found = []
    for u, v in zip(left.split(counts.tolist()), right.split(counts.tolist())):
        if len(u) * (left.shape[1] + right.shape[1]) < 2 * numel:
            found.append(torch.dot((u @ u.mT).flatten(), (v @ v.mT).flatten()))
        else:
            whole = (u.mT @ v).flatten()
            found.append(torch.dot(whole, whole))
    norm = left.new_zeros(batch_size)
    return norm.index_add_(0, keys // size, torch.stack(found)).clamp_(min=0)


def groups_of(dense: List[T], places: T) -> Iterator[Tuple[T, List[T]]]:
    """
    The rows of each place as a sample of their own: factors ``[groups, rows, width]``,
    padded with zeros. Small groups of about one size come together, so that at most
    half of it is padding however uneven they are.

    Args:
        dense: ``[rows, width]``

    Yields:
        The place of each group, and its factors.
    """
    sorted_, order = places.sort(stable=True)
    keys, counts = torch.unique_consecutive(sorted_, return_counts=True)
    if len(order) >= _LARGE * len(keys):
        if runs_of(places) is None:
            dense = [f.index_select(0, order) for f in dense]
        else:
            keys, counts = places.unique_consecutive(return_counts=True)
        parts = zip(*(f.split(counts.tolist()) for f in dense))
        for key, part in zip(keys.split(1), parts):
            yield key, [f[None] for f in part]
        return
    starts, level = counts.cumsum(0) - counts, counts.float().log2().ceil()
    for i in level.unique().tolist():
        chosen = level == i
        step = torch.arange(int(counts[chosen].max()), device=places.device)
        inside = step < counts[chosen, None]
        rows = order[(starts[chosen, None] + step).clamp(max=len(order) - 1)]
        first, *rest = (
            f.index_select(0, rows.flatten()).view(*rows.shape, -1) for f in dense
        )
        yield keys[chosen], [first * inside[..., None], *rest]
