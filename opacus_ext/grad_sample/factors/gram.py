"""Inner products by Gram matrices: all rows of one term meet all rows of another."""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch

from opacus_ext.grad_sample.factors.rows import (
    Factor,
    OneHot,
    entries,
    steps,
    with_entries,
)
from opacus_ext.grad_sample.factors.settings import workspace


def inner(
    left: Tuple[Factor, ...], right: Optional[Tuple[Factor, ...]], dtype: torch.dtype
) -> torch.Tensor:
    """
    ``sum_{t,t'} prod_k <left_k[t], right_k[t']>``, in chunks of t under the workspace.

    Args:
        left: factors ``[B, T, width]``
        right: factors of the same widths; None: the same
        dtype: to compute in

    Returns:
        ``[B]``
    """
    batch_size, rows = entries(left[0]).shape[:2]
    symmetric = right is None
    right = left if right is None else right
    others = entries(right[0]).shape[1]
    size = 2 * batch_size * others * dtype.itemsize
    step = max(1, workspace() // max(1, size))
    if symmetric:
        # Only one of the triangles: a chunk meets itself and, twice, what follows.
        step = min(step, max(64, math.ceil(rows / 4)))
    total = torch.zeros(batch_size, dtype=dtype, device=entries(left[0]).device)
    for start, stop in steps(rows, step):
        product = None
        for f, g in zip(left, right):
            if symmetric:
                g = _places(g, start, rows)
            gram = _gram(_places(f, start, stop), g, dtype)
            product = gram if product is None else product.mul_(gram)
        if symmetric and product.shape[2] > product.shape[1]:
            product[:, :, stop - start :] *= 2
        total = total + product.sum((1, 2))
    return total


def _places(factor: Factor, start: int, stop: int) -> Factor:
    return with_entries(factor, entries(factor)[:, start:stop])


def _gram(f: Factor, g: Factor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, T, T']`` of ``<f[t], g[t']>``."""
    if isinstance(f, OneHot) and isinstance(g, OneHot):
        return (f.index[:, :, None] == g.index[:, None, :]).to(dtype)
    if isinstance(f, OneHot):
        return _gram(g, f, dtype).mT.contiguous()
    if isinstance(g, OneHot):
        index = g.index[:, None, :].expand(-1, f.shape[1], -1)
        return f.gather(2, index).to(dtype)
    return torch.bmm(f.to(dtype), g.to(dtype).mT)
