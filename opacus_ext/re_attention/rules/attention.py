"""Attention as PyTorch computes it, and what comes out of a corrected one."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from opacus_ext.grad_sample.core.vmap import whole
from opacus_ext.re_attention import moments
from opacus_ext.re_attention.moments import Moments
from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Variance,
    squares,
    wide,
)

# Attention weights in memory at once, of all samples and heads.
_CHUNK = 1 << 24
_CHUNK_IN_CACHE = 1 << 18


@register_propagation("scaled_dot_product_attention")
def _attention(call: Call) -> Result:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    q, k, v, mask, dropout_p, causal = (call.arg(i, n) for i, n in enumerate(names))
    repeats = q.size(-3) // k.size(-3) if call.kwargs.get("enable_gqa") else 1
    return attention_variance(
        call.moments(q),
        _repeated(call.moments(k), repeats),
        _repeated(call.moments(v), repeats),
        mask=mask,
        causal=bool(causal),
        scale=call.kwargs.get("scale"),
        out=call.out,
    )


def _repeated(x: Moments, repeats: int) -> Moments:
    """Keys or values ``[*, groups, U, d]`` repeated for all heads."""
    if repeats == 1:
        return x
    return Moments(
        x.mean.repeat_interleave(repeats, -3), repeat_heads(x.variance, repeats)
    )


def repeat_heads(variance: Tensor, repeats: int) -> Tensor:
    """The variance of keys, or values, that are repeated for a group of queries."""
    one = repeats == 1 or variance.dim() < 3 or variance.size(-3) == 1
    return variance if one else variance.repeat_interleave(repeats, -3)


def attention_variance(
    q: Moments,
    k: Moments,
    v: Moments,
    *,
    mask: Optional[Tensor],
    causal: bool,
    scale: Optional[float],
    out: Tensor,
    correction: Optional[Tensor] = None,
) -> Variance:
    """
    ``moments.attention`` of one variance a token, some queries at a time, so that
    memory is linear in T.

    Args:
        q: ``[B, H, T, d]``
        k: ``[B, H, U, d]``
        v: ``[B, H, U, e]``
        mask: boolean or added, broadcastable to ``[B, H, T, U]``
        causal: whether a query sees keys up to its own position only
        scale: in place of 1 / sqrt(d)
        out: the output ``[B, H, T, e]``
        correction: the variances ``[B, H, U, 1]`` that the logits were corrected for
    """
    (length, d), keys = q.mean.shape[-2:], k.mean.size(-2)
    scale = d**-0.5 if scale is None else scale
    full = (*q.mean.shape[:-1], 1)
    s_q = q.variance.expand(full)
    q, k, v = (Moments(wide(x.mean), x.variance) for x in (q, k, v))
    k, v = (Moments(x.mean, x.variance.expand(*x.mean.shape[:-1], 1)) for x in (k, v))
    chunk = _CHUNK if q.mean.is_cuda else _CHUNK_IN_CACHE
    rows = max(chunk // max(whole(q.mean).numel() // (length * d) * keys, 1), 8)
    left, right = q.mean * scale, k.mean
    if correction is not None:  # one more element of both, as in the attention
        left = torch.cat([left, squares(q.mean) * (-(scale**2) / 2)], -1)
        right = torch.cat([right, correction.expand_as(k.variance)], -1)
    given, parts, every = wide(out), [], (k, v)
    for at in range(0, length, rows):
        to = min(at + rows, length)
        seen = min(to, keys) if causal else keys  # the others have no part in it
        k, v = (Moments(*(z[..., :seen, :] for z in x)) for x in every)
        logits = left[..., at:to, :] @ right[..., :seen, :].transpose(-1, -2)
        if causal:
            ones = torch.ones(to - at, seen, dtype=torch.bool, device=logits.device)
            logits.masked_fill_(ones.tril_(at).logical_not_(), -torch.inf)
        if mask is not None:
            part = mask[..., at:to, :] if mask.size(-2) > 1 else mask
            part = part[..., :seen] if part.size(-1) > 1 else part
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -torch.inf)
            else:
                logits = logits + part
        p = torch.softmax(logits, -1)
        p = p if mask is None else p.nan_to_num_()
        queries = Moments(q.mean[..., at:to, :], s_q[..., at:to, :])
        at_queries = given[..., at:to, :]
        parts.append(moments.attention(queries, k, v, p, at_queries, scale))
    return Variance(torch.cat(parts, -2) if parts else s_q)
