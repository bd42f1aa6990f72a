"""Factors: rows of which per-sample gradients are outer products, and how they meet.

Rows meet all with all, in Gram matrices (:func:`inner`), or by their place: those of
one sample and of one index. A place is ``sample * size + index``, one for each row;
``size`` is the number of indices.
"""

from __future__ import annotations

import math
from typing import Any, Iterable, Iterator, NamedTuple, Sequence, Union

import torch

from opacus_ext.refused import Refused

T = torch.Tensor
_LARGE = 128  # rows of a group that is a product of its own
_workspace = 64 * 2**20


class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` ``[B, T]`` and zero elsewhere."""

    index: T
    size: int


Factor = Union[T, OneHot]  # dense rows are [B, T, width]


def entries(factor: Factor) -> T:
    """``[B, T, ...]``: the index of one-hot rows, dense ones as they are."""
    return factor.index if isinstance(factor, OneHot) else factor


def cut(factor: Factor, where: Any) -> Factor:
    """Some rows of a factor."""
    rows = entries(factor)[where]
    return OneHot(rows, factor.size) if isinstance(factor, OneHot) else rows


def joined(factors: Sequence[Factor]) -> Factor:
    """The rows of factors of one kind, one factor after the other."""
    if len(factors) == 1:
        return factors[0]
    rows = torch.cat([entries(f) for f in factors], dim=1)
    return OneHot(rows, width_of(factors[0])) if rows.dim() == 2 else rows


def width_of(factor: Factor) -> int:
    """The size of a row."""
    return factor.size if isinstance(factor, OneHot) else factor.shape[2]


def wide(x: T) -> T:
    """Widens half precision: norms are accumulated in float32 or better."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dtype_of(*dtypes: torch.dtype) -> torch.dtype:
    """The type that norms of these are accumulated in: float32 or wider."""
    found = torch.float32
    for dtype in dtypes:
        found = torch.promote_types(found, dtype)
    return found


def product(sizes: Iterable[int]) -> int:
    """The product of sizes; compilers do not know ``math.prod``."""
    found = 1
    for size in sizes:
        found *= size
    return found


def steps(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Yields where each part of an axis begins and ends."""
    for start in range(0, size, step):
        yield start, min(start + step, size)


def square_sum(x: T) -> T:
    """Squared norms ``[B]`` of what each sample has, ``[B, ...]``."""
    x = x if x.dim() == 2 else x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).square_()


# -- memory ----------------------------------------------------------------------------


class _Bound(int):
    """A bound that comes back into force where a ``with`` block ends."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        workspace(self)


def workspace(num_bytes: int | None = None) -> int:
    """
    The one setting that trades memory for time: how many bytes the per-sample
    gradients may occupy for a while beside what training needs anyway.

    It bounds the blocks in which norms are computed, and in "ghost_bk" also the sum
    of all per-sample gradients that are cached from the norm to the clipped sum.
    Results do not depend on it.

    Args:
        num_bytes: new bound in bytes, for good or for a ``with`` block; None leaves it
            as it is

    Returns:
        The bound in force before the call, in bytes.

    Raises:
        Refused: if ``num_bytes`` is not positive

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.workspace(256 * 2**20)
        >>> opacus_ext.workspace(before) == 256 * 2**20
        True
        >>> with opacus_ext.workspace(2**20):
        ...     print(opacus_ext.workspace())
        1048576
        >>> opacus_ext.workspace() == before
        True
    """
    global _workspace
    if num_bytes is None:
        return _workspace
    if num_bytes <= 0:
        raise Refused(
            f"The workspace must be positive, got {num_bytes} bytes.",
            parameter="num_bytes",
            remedy="Results do not depend on it; the default is 64 MiB.",
        )
    before, _workspace = _workspace, int(num_bytes)
    return _Bound(before)


# -- rows that meet --------------------------------------------------------------------


def inner(
    left: tuple[Factor, ...], right: tuple[Factor, ...] | None, dtype: torch.dtype
) -> T:
    """
    ``sum_{t,t'} prod_k <left_k[t], right_k[t']>``, for each sample, in chunks of t
    under the workspace; without ``right`` those of ``left`` with each other.
    """
    first, symmetric = entries(left[0]), right is None
    batch_size, rows = first.shape[:2]
    right = left if right is None else right
    size = 2 * batch_size * entries(right[0]).shape[1] * dtype.itemsize
    step = max(1, workspace() // max(1, size))
    if symmetric:
        # Only one of the triangles: a chunk meets itself and, twice, what follows.
        step = min(step, max(64, math.ceil(rows / 4)))
    total = torch.zeros(batch_size, dtype=dtype, device=first.device)
    for start, stop in steps(rows, step):
        product: Any = None
        for f, g in zip(left, right):
            g = cut(g, (slice(None), slice(start, None))) if symmetric else g
            gram = _gram(cut(f, (slice(None), slice(start, stop))), g, dtype)
            product = gram if product is None else product.mul_(gram)
        if symmetric and product.shape[2] > product.shape[1]:
            product[:, :, stop - start :] *= 2
        total = total + product.sum((1, 2))
    return total


def _gram(f: Factor, g: Factor, dtype: torch.dtype) -> T:
    """``[B, T, T']`` of ``<f[t], g[t']>``."""
    if isinstance(f, OneHot) and isinstance(g, OneHot):
        return (f.index[:, :, None] == g.index[:, None, :]).to(dtype)
    if isinstance(f, OneHot):
        return _gram(g, f, dtype).mT.contiguous()
    if isinstance(g, OneHot):
        index = g.index[:, None, :].expand(-1, f.shape[1], -1)
        return f.gather(2, index).to(dtype)
    return torch.bmm(f.to(dtype), g.to(dtype).mT)


def places_of(onehot: Sequence[OneHot]) -> tuple[T, int]:
    """The place of each row, flattened, and ``size``, by all one-hot factors."""
    index, size = onehot[0]
    for other in onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    samples = torch.arange(len(index), device=index.device)[:, None]
    return (samples * size + index).flatten(), size


def square_of_sums(rows: T, places: T, size: int, batch_size: int) -> T:
    """Sums the rows ``[rows, width]`` of each place; squared norms of these ``[B]``."""
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


def groups_of(
    dense: Sequence[T], places: T, large: int = _LARGE
) -> Iterator[tuple[T | slice, list[T]]]:
    """
    The rows of each place as a sample of their own: factors ``[groups, rows, width]``,
    padded with zeros, behind their places. Small groups of about one size come
    together, so that at most half of it is padding however uneven they are; groups of
    ``large`` or more rows on average come one by one.
    """
    ranked, order = places.sort(stable=True)
    keys, counts = torch.unique_consecutive(ranked, return_counts=True)
    flat = [f.flatten(0, 1).index_select(0, order) for f in dense]
    if len(order) >= large * len(keys):
        parts = zip(*(f.split(counts.tolist()) for f in flat))
        for key, part in zip(keys.tolist(), parts):
            yield slice(key, key + 1), [f[None] for f in part]
        return
    starts = counts.cumsum(0) - counts
    level = counts.float().log2().ceil()
    for i in level.unique().tolist():
        chosen = level == i
        step = torch.arange(int(counts[chosen].max()), device=places.device)
        inside = step < counts[chosen, None]
        rows = (starts[chosen, None] + step).clamp(max=len(order) - 1)
        first, *rest = (
            f.index_select(0, rows.flatten()).view(*rows.shape, -1) for f in flat
        )
        yield keys[chosen], [first * inside[..., None], *rest]
