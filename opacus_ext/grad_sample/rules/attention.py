"""Attention by torch's fused kernels, which vmap does not support."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.registry import handles, op_of_all

T = torch.Tensor


@handles(F.scaled_dot_product_attention)
def attention(
    group: Any,
    func: Callable,
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """Runs the fused kernels on the batch of all samples."""
    given = [group.own(x) for x in (query, key, value, attn_mask)]
    others = dropout_p, is_causal, scale, enable_gqa
    if not group.eager:
        return _compiled(*given, *others)
    if not any(map(group.is_batched, given)):
        return _attention(*given, *others)
    inner = [None if x is None else group.inner(x) for x in given]
    with group.outside():
        return group.wrap(_of_all(None, (0,) * 4, *inner, *others)[0])


def _attention(*given: Any) -> T:
    *first, scale, gqa = given
    run: Callable = F.scaled_dot_product_attention
    return run(*first, scale=scale, enable_gqa=gqa)


def _of_all(info: Any, in_dims: tuple, *given: Any) -> tuple[T, int]:
    """The vmap rule: runs all samples, with tensors ``[B, *shape]``."""
    tensors, dims = [], 2
    for x, dim in zip(given[:4], in_dims):
        if x is not None:
            x = x[None] if dim is None else x.movedim(dim, 0)
            dims = max(dims, x.dim() - 1)
            x = x.reshape(len(x), *[1] * (5 - x.dim()), *x.shape[1:])
        tensors.append(x)
    leads = {x.shape[:2] for x in tensors if x is not None}
    lead = leads.pop() if len(leads) == 1 else torch.broadcast_shapes(*leads)
    expanded = [
        None if x is None else x.expand(*lead, *x.shape[2:]).flatten(0, 1)
        for x in tensors
    ]
    y = _attention(*expanded, *given[4:]).unflatten(0, lead)
    return y.reshape(lead[0], *y.shape[-dims:]), 0


_compiled = op_of_all(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, "
    "bool causal, float? scale, bool gqa) -> Tensor",
    _attention,
    _of_all,
)
