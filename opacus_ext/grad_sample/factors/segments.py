"""Rows that meet by their place: those of one sample and of one index.

A place is ``sample * size + index``, one for each row; ``size`` is the number of
indices.
"""

from __future__ import annotations

from typing import Iterator, List, Sequence, Tuple

import torch

from opacus_ext.grad_sample.factors.rows import OneHot, square_sum

T = torch.Tensor

_LARGE = 128  # rows of a group that is a product of its own


def places_of(onehot: Sequence[OneHot]) -> Tuple[T, int]:
    """The place of each row, flattened, and ``size``, by all one-hot factors."""
    index, size = onehot[0]
    for other in onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    samples = torch.arange(len(index), device=index.device)[:, None]
    return (samples * size + index).flatten(), size


def square_of_sums(rows: T, places: T, size: int, batch_size: int) -> T:
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


def groups_of(dense: Sequence[T], places: T) -> Iterator[Tuple[T, List[T]]]:
    """
    The rows of each place as a sample of their own: factors ``[groups, rows, width]``,
    padded with zeros. Small groups of about one size come together, so that at most
    half of it is padding however uneven they are.

    Args:
        dense: ``[B, T, width]``

    Yields:
        The place of each group, and its factors.
    """
    flat = [f.flatten(0, 1) for f in dense]
    ranked, order = places.sort(stable=True)
    keys, counts = torch.unique_consecutive(ranked, return_counts=True)
    starts = counts.cumsum(0) - counts
    if len(order) >= _LARGE * len(keys):
        for key, *ends in zip(keys.split(1), starts.tolist(), counts.tolist()):
            start, count = ends
            rows = order[start : start + count]
            yield key, [f.index_select(0, rows)[None] for f in flat]
        return
    level = counts.float().log2().ceil()
    for i in level.unique().tolist():
        chosen = level == i
        step = torch.arange(int(counts[chosen].max()), device=places.device)
        inside = step < counts[chosen, None]
        rows = order[(starts[chosen, None] + step).clamp(max=len(order) - 1)]
        first, *rest = (
            f.index_select(0, rows.flatten()).view(*rows.shape, -1) for f in flat
        )
        yield keys[chosen], [first * inside[..., None], *rest]
