"""Attention has no parameters, and vmap does not know torch's fused kernels."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from opacus_ext.grad_sample.rules.registry import handles

T = torch.Tensor


@handles(F.scaled_dot_product_attention)
def attention(
    group: Any,
    func: Callable,
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Runs the fused kernels on the batch of all samples."""
    given = [group.own(x) for x in (query, key, value, attn_mask)]
    if not any(map(group.is_batched, given)):
        return func(*given, *args, **kwargs)
    if not group.eager:
        with sdpa_kernel(SDPBackend.MATH):  # ops that vmap and the compiler know
            return func(*given, *args, **kwargs)
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


def _with_dims(group: Any, x: T, dims: int) -> T:
    x = group.inner(x)
    return x.reshape(x.shape[:1] + (1,) * (dims + 1 - x.dim()) + x.shape[1:])
