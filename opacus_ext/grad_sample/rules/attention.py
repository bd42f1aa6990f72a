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


def _attention(*args: Any) -> T:
    """Calls torch's function, which takes the last two arguments by keyword only."""
    *positional, scale, enable_gqa = args
    function: Callable = F.scaled_dot_product_attention
    return function(*positional, scale=scale, enable_gqa=enable_gqa)


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
    # The result has as many dims as the widest input; the kernel takes four.
    tensors, dims, batches = [], 2, set()
    for tensor in (query, key, value, attn_mask):
        if tensor is not None:
            dims = max(dims, tensor.ndim - 1)
            if tensor.ndim < 5:
                size, *shape = tensor.shape
                ones = [1] * (5 - tensor.ndim)
                tensor = tensor.reshape(size, *ones, *shape)
            batches.add(tensor.shape[:2])
        tensors.append(tensor)
    batch = batches.pop()
    if batches:
        batch = torch.broadcast_shapes(batch, *batches)
    # A mask, or an input, that samples share is expanded to all of them.
    for position, tensor in enumerate(tensors):
        if tensor is not None:
            if tensor.shape[:2] != batch:
                tensor = tensor.expand(*batch, *tensor.shape[2:])
            tensors[position] = tensor.flatten(0, 1)
    outputs = _attention(*tensors, dropout_p, is_causal, scale, enable_gqa)
    size, rows = batch
    shape = [rows, *outputs.shape[1:]]
    return outputs.reshape(size, *shape[-dims:])


IN_COMPILED[F.scaled_dot_product_attention] = library_op(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
    _attention,
    attention,
)
