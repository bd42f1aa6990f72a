"""Attention, by torch's fused kernels: they have no parameters, and vmap no kernel."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.registry import handles

T = torch.Tensor


@handles(F.scaled_dot_product_attention)
def attention(
    group: Any,
    func: Callable,
    query: T,
    key: T,
    value: T,
    attn_mask: Optional[T] = None,
    *args: Any,
    **kwargs: Any,
) -> T:
    """The fused kernels on the batch of all samples."""
    given = [group.own(x) for x in (query, key, value, attn_mask)]
    if not any(map(group.is_batched, given)):
        return func(*given, *args, **kwargs)
    if not group.eager:
        return _in_steps(*given, *args, **kwargs)
    dims = max(x.dim() for x in given[:3])
    inner = [None if x is None else _with_dims(group, x, dims) for x in given]
    with group.outside():
        if dims < 4:  # [T, d] or [heads, T, d] of each sample
            return group.wrap(func(*inner, *args, **kwargs))
        lead = torch.broadcast_shapes(*(x.shape[:2] for x in inner if x is not None))
        inner = [
            None if x is None else x.expand(*lead, *x.shape[2:]).flatten(0, 1)
            for x in inner
        ]
        return group.wrap(func(*inner, *args, **kwargs).unflatten(0, lead))


def _in_steps(
    query: T,
    key: T,
    value: T,
    attn_mask: Optional[T],
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> T:
    """The same by ops that vmap and the compiler know."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(
            scores.shape[-2:], dtype=torch.bool, device=scores.device
        ).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is not None and not is_causal:  # what sees nothing gives zeros
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights, dropout_p) @ value


def _with_dims(group: Any, x: T, dims: int) -> T:
    x = group.inner(x)
    return x.reshape(x.shape[:1] + (1,) * (dims + 1 - x.dim()) + x.shape[1:])
