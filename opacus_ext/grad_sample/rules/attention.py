"""Attention by torch's fused kernels, which vmap does not support."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.registry import (
    IN_COMPILED,
    library_op,
    of_all,
)

T = torch.Tensor


def _attention(*given: Any) -> T:
    *first, scale, gqa = given
    run: Callable = F.scaled_dot_product_attention
    return run(*first, scale=scale, enable_gqa=gqa)


@of_all(F.scaled_dot_product_attention)
def attention(
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """Takes samples as rows of the batch: ``[B, N, heads, length, width]``."""
    tensors, dims, leads = [], 2, set()
    for x in (query, key, value, attn_mask):
        if x is not None:
            dims = max(dims, x.ndim - 1)
            if x.ndim < 5:
                x = x.reshape(x.shape[0], *[1] * (5 - x.ndim), *x.shape[1:])
            leads.add(x.shape[:2])
        tensors.append(x)
    lead = leads.pop()
    if leads:
        lead = torch.broadcast_shapes(lead, *leads)
        tensors = [x if x is None else x.expand(*lead, *x.shape[2:]) for x in tensors]
    rows = [x if x is None else x.flatten(0, 1) for x in tensors]
    y = _attention(*rows, dropout_p, is_causal, scale, enable_gqa)
    return y.reshape(lead[0], *[*lead[1:], *y.shape[1:]][-dims:])


IN_COMPILED[F.scaled_dot_product_attention] = library_op(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
    _attention,
    attention,
)
