"""The four operations on the sum of several terms of the same samples and shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.factors import cost
from opacus_ext.grad_sample.factors.rows import known, num_bytes, square_sum
from opacus_ext.grad_sample.factors.settings import bound_on, workspace
from opacus_ext.grad_sample.factors.term import Norms, Term, dtype_of

if TYPE_CHECKING:
    from opacus_ext.grad_sample.factors.batched import Batched


def merged(terms: Sequence[Term]) -> List[Term]:
    """Concatenates the terms of one kind, so that cross terms between them vanish."""
    if len(terms) < 2:
        return list(terms)
    kinds: dict = {}
    for term in (t.resolved() for t in terms):
        kinds.setdefault(term.kind, []).append(term)
    return [
        same[0].joined(same) if len(same) > 1 else same[0] for same in kinds.values()
    ]


def materialise(terms: Sequence[Term], shape: torch.Size) -> torch.Tensor:
    """``[B, numel]``, of one term at least."""
    if any(t.sliced for t in terms):
        out = None
        for samples, columns, parts in _slices(terms, shape):
            new = materialise(parts, _of_columns(shape, columns))
            if out is None:
                out = new.new_zeros(terms[0].batch_size, *shape)
            out[samples, columns] = new.view(-1, *_of_columns(shape, columns))
        return out.flatten(1)
    if len(terms) == 1:
        return terms[0].materialise(dtype_of(*terms))
    out, dtype = None, dtype_of(*terms)
    for term in _dense_first(terms):
        out = term.materialise(dtype, out)
    return out


def squared_norm(terms: Sequence[Term], shape: torch.Size, cache: int) -> Norms:
    """
    Squared norms ``[B]``, never negative, of one term at least.

    Args:
        terms: as :func:`merged` gives them
        cache: bytes that may be spent on gradients to be returned
    """
    if any(t.sliced for t in terms):
        return _squared_norm_by_slices(terms, shape, cache)
    if not any(t.length for t in terms):
        return Norms(torch.zeros(terms[0].batch_size))
    if len(terms) == 1:
        return terms[0].squared_norm(cache)
    return squared_norm_of_batched(terms, cache)


def squared_norm_of_batched(terms: Sequence[Batched], cache: int) -> Norms:
    """
    By the cheapest of three ways under :func:`workspace`: products of Gram matrices,
    sums over segments of equal index, or gradients materialised block by block.
    """
    grams, blocks = cost.of_grams(terms), cost.of_blocks(terms)
    if cost.worth_caching(terms, cache, min(grams, blocks)):
        rows = materialise(terms, torch.Size(terms[0].widths)).flatten(1)
        return Norms(square_sum(rows), rows, num_bytes(rows))
    if grams <= blocks:
        norm = sum(t.square_by_grams() for t in terms)
        for i, u in enumerate(terms):
            norm = norm + 2 * sum(u.inner(v) for v in terms[:i])
    else:
        norm = _square_by_blocks(terms)
    return Norms(norm.clamp(min=0))


def inner(left: Sequence[Term], right: Sequence[Term], batch_size: int) -> torch.Tensor:
    """``[B]``, the inner products of the sums of two lists of terms."""
    total = torch.zeros(batch_size)
    others = merged([t.resolved() for t in right])
    for u in merged([t.resolved() for t in left]):
        for v in others:
            total = total.to(u.device) + u.inner(v)
    return total


def weighted_sum(
    terms: Sequence[Term], shape: torch.Size, weights: torch.Tensor
) -> torch.Tensor:
    """``[*shape]``, the sum over samples of their weights times gradients."""
    if any(t.sliced for t in terms):
        total = None
        for samples, columns, parts in _slices(terms, shape):
            part = _of_columns(shape, columns)
            new = weighted_sum(parts, part, weights[samples])
            if total is None:
                total = new.new_zeros(shape)
            total[columns] += new
        return total
    dtype = dtype_of(*terms) if any(t.dense for t in terms) else weights.dtype
    if len(terms) == 1:
        return terms[0].weighted_sum(weights, dtype).reshape(shape)
    total = None
    for term in _dense_first(terms):
        total = term.weighted_sum(weights, dtype, total)
    return total.view(shape)


def _dense_first(terms: Sequence[Term]) -> List[Term]:
    """Rows computed; one-hot terms last: they add into the entries that they touch."""
    terms = [t.resolved() if t.deferred else t for t in terms]
    return sorted(terms, key=lambda t: len(t.onehot))


def _square_by_blocks(terms: Sequence[Batched]) -> torch.Tensor:
    widths = max((t.widths for t in terms), key=len)
    terms = [t.split(widths) for t in terms]
    axis = max(range(len(widths)), key=widths.__getitem__)
    size = known(terms[0].batch_size) * known(math.prod(widths)) * 8
    bound = bound_on(terms[0].device.type)
    # Those of a shared parameter are not in memory at once but to be cached.
    count = max(4 if len(terms) > 1 or terms[0].onehot else 1, size // bound)
    step = max(1, math.ceil(widths[axis] / count))
    norm, dtype = 0, dtype_of(*terms)
    for start in range(0, widths[axis], step):
        block = None
        for t in terms:
            part = t.cut(axis, start, start + step)
            block = part.materialise(dtype, block)
        norm = norm + square_sum(block)
    return norm


# -- slices of the batch and of the parameter's first axis -----------------------------


def _of_columns(shape: torch.Size, columns: slice) -> torch.Size:
    return torch.Size((columns.stop - columns.start, *shape[1:]))


def _slices(
    terms: Sequence[Term], shape: torch.Size
) -> Iterator[Tuple[slice, slice, List[Term]]]:
    size, width = terms[0].batch_size, shape[0]
    first = next(t for t in terms if t.sliced)
    itemsize = max(4, first.factors[0].dtype.itemsize)
    entries = max(1, workspace() // (max(1, first.length) * itemsize))
    step = min(width, max(64, entries))
    some = max(1, entries // step)
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        for i in range(0, size, some):
            samples = slice(i, min(i + some, size))
            yield samples, columns, [t.part(shape, samples, columns) for t in terms]


def _squared_norm_by_slices(
    terms: Sequence[Term], shape: torch.Size, cache: int
) -> Norms:
    batch_size = terms[0].batch_size
    if known(batch_size * math.prod(shape)) * 8 <= cache:
        rows = materialise(terms, shape)
        return Norms(square_sum(rows), rows, num_bytes(rows))
    norm: Optional[torch.Tensor] = None
    for samples, columns, parts in _slices(terms, shape):
        part = _of_columns(shape, columns)
        new = squared_norm(merged(parts), part, 0).squares
        if norm is None:
            norm = new.new_zeros(batch_size)
        norm[samples] += new
    return Norms(norm)
