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
        return _by_sample(*given, *args, **kwargs)
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


def _by_sample(
    query: T,
    key: T,
    value: T,
    mask: T | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """Compiled: the fused kernel as an op with a rule for vmap, but for dropout."""
    if query.dim() == 4 and dropout_p == 0:
        given = query, key, value, mask, is_causal, scale, enable_gqa
        return torch.ops.opacus_ext.attention(*given)
    given = query, key, value, mask, dropout_p, is_causal
    with sdpa_kernel(SDPBackend.MATH):  # ops that vmap and the compiler know
        return F.scaled_dot_product_attention(
            *given, scale=scale, enable_gqa=enable_gqa
        )


def _attention(
    query: T,
    key: T,
    value: T,
    mask: T | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> T:
    return F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa
    )


def _of_all(info: Any, in_dims: tuple, *given: Any) -> tuple[T, int]:
    """The same of all samples ``[B, *shape]``, in the first dim of four."""
    tensors = []
    for x, dim in zip(given[:4], in_dims):
        if x is not None:
            x = x[None] if dim is None else x.movedim(dim, 0)
            x = x.reshape(len(x), *[1] * (5 - x.dim()), *x.shape[1:])
        tensors.append(x)
    lead = torch.broadcast_shapes(*(x.shape[:2] for x in tensors if x is not None))
    wide = [
        None if x is None else x.expand(*lead, *x.shape[2:]).flatten(0, 1)
        for x in tensors
    ]
    return _attention(*wide, *given[4:]).unflatten(0, lead), 0


_library = torch.library.Library("opacus_ext", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "float? scale, bool gqa) -> Tensor"
)
_library.impl("attention", _attention, "CompositeImplicitAutograd")
torch.library.register_vmap("opacus_ext::attention", _of_all, lib=_library)


def _with_dims(group: Any, x: T, dims: int) -> T:
    x = group.inner(x)
    return x.reshape(x.shape[:1] + (1,) * (dims + 1 - x.dim()) + x.shape[1:])
