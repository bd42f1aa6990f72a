"""Factors: the rows of which per-sample gradients are outer products."""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple, Tuple, Union

import torch

T = torch.Tensor


class OneHot(NamedTuple):
    """Rows ``[B, T, size]`` that are one at ``index`` ``[B, T]`` and zero elsewhere."""

    index: T
    size: int


Factor = Union[T, OneHot]  # dense rows are [B, T, width]


def entries(factor: Factor) -> T:
    """``[B, T, ...]``: the index of one-hot rows, dense ones as they are."""
    return factor.index if isinstance(factor, OneHot) else factor


def with_entries(factor: Factor, rows: T) -> Factor:
    """A factor of the same kind with other rows."""
    return OneHot(rows, factor.size) if isinstance(factor, OneHot) else rows


def width_of(factor: Factor) -> int:
    """Size of a row."""
    return factor.size if isinstance(factor, OneHot) else factor.shape[2]


def wide(x: T) -> T:
    """Half precision is widened: norms are accumulated in float32 or better."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dtype_of(*dtypes: torch.dtype) -> torch.dtype:
    """The type that norms of these are accumulated in: float32 or wider."""
    found = torch.float32
    for dtype in dtypes:
        found = torch.promote_types(found, dtype)
    return found


def product(sizes: Iterable[int]) -> int:
    """Of sizes; ``math.prod`` is not known to compilers."""
    found = 1
    for size in sizes:
        found *= size
    return found


def steps(size: int, step: int) -> Iterator[Tuple[int, int]]:
    """Where the parts of an axis begin and end."""
    for start in range(0, size, step):
        yield start, min(start + step, size)


def square_sum(x: T) -> T:
    """Squared norms ``[B]`` of what each sample has, ``[B, ...]``."""
    x = x if x.dim() == 2 else x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).square_()
