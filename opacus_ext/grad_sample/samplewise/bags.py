"""Bags of embeddings, as embeddings and what is made of them."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.ops import handles
from opacus_ext.grad_sample.samplewise.run import Run

T = torch.Tensor


@handles(F.embedding_bag)
def embedding_bag(
    run: Run,
    func: Callable,
    input: T,
    weight: T,
    offsets: Optional[T] = None,
    max_norm: Optional[float] = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Optional[T] = None,
    include_last_offset: bool = False,
    padding_idx: Optional[int] = None,
) -> T:
    """Sum, mean or maximum over each bag of the rows ``weight[input]``."""
    given = (max_norm, norm_type, scale_grad_by_freq, mode, sparse)
    more = (per_sample_weights, include_last_offset, padding_idx)
    if not any(is_batched(x) for x in (input, weight, *more[:1]) if x is not None):
        return func(input, weight, offsets, *given, *more)
    used: Optional[T] = None
    if input.dim() == 1:
        index, used = _bags(
            run.agree(offsets).tolist(), len(input), include_last_offset
        )
        index, used = index.to(input.device), used.to(input.device)
    with run:
        if input.dim() == 1:
            input = input[index]
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights[index]
        if padding_idx is not None:
            counts = input != padding_idx % len(weight)
            used = counts if used is None else counts & used
        rows = F.embedding(input, weight, padding_idx, *given[:3], sparse)
        if mode == "max":
            return _maximum(rows, used)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if used is None:
            return rows.sum(1) if mode == "sum" else rows.mean(1)
        total = rows.masked_fill(~used.unsqueeze(-1), 0).sum(1)
        if mode == "sum":
            return total
        return total / used.sum(1, keepdim=True).clamp(min=1)


def _bags(starts: List[int], size: int, last: bool) -> Tuple[T, T]:
    """
    Returns:
        the places that each bag holds ``[bags, longest]``, and which of these it has
    """
    ends = starts[1:] if last else [*starts[1:], size]
    lengths = torch.tensor([end - start for start, end in zip(starts, ends)])
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    steps = torch.arange(longest)
    used = steps < lengths[:, None]
    begin = torch.tensor(starts[: len(ends)])[:, None]
    return (begin + steps).masked_fill(~used, 0), used


def _maximum(rows: T, used: Any) -> T:
    if used is None:
        return rows.max(1).values
    wide = used.unsqueeze(-1)
    found = rows.masked_fill(~wide, -torch.inf).max(1).values
    return found.masked_fill(~wide.any(1), 0)
