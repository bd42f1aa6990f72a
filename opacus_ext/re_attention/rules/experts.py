"""Mixtures of experts: rows that go through matrices of their own."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from opacus_ext.grad_sample.rules.experts import Routes, at_once
from opacus_ext.grad_sample.samplewise.functorch import whole, wrapped_like
from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    plus,
    wide,
    zeros,
)


@register_propagation("grouped_mm", "grouped_mm_fallback")
def _grouped_mm(call: Call) -> Result:
    """Rows ``[rows, in]`` times the matrix ``[in, out]`` of their group each."""
    x, weight, *rest = call.args
    ends = rest[0] if rest else call.kwargs.get("offs")
    if x.dim() != 2 or weight.dim() != 3 or ends is None or call.kwargs.get("bias"):
        return Lost("grouped_mm")
    rows = torch.arange(len(x), device=x.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True).clamp(max=len(weight) - 1)
    return _by_group(call, x, group, weight, None, 1)


@register_propagation("expert_linear")
def _expert_linear(call: Call) -> Result:
    """Of ``grad_sample.rules.experts``."""
    x, routes, weight, bias, transposed = (*call.args, None, False)[:5]
    # Its table is that of the whole batch.
    group = wrapped_like(x, routes.index.view(whole(x).shape[:-1]))
    return _by_group(call, x, group, weight, bias, 1 if transposed else 2)


def _by_group(
    call: Call,
    x: Tensor,
    group: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    inner: int,
) -> Variance:
    """
    :func:`_product` with a matrix of each row's own.

    Args:
        x: ``[*rows, in]``
        group: the number of the matrix, ``[*rows]``
        weight: ``[groups, in, out]`` or ``[groups, out, in]``
        bias: ``[groups, out]``
        inner: the dimension that is summed over
    """
    noise, passed, own = call.token(weight), call.token(x), None
    gain = wide(weight).square().sum(inner)[group] if passed is not None else None
    if noise is not None:
        noise = noise.expand(*weight.shape[:2], 1).mean((1, 2))[group].unsqueeze(-1)
        own = call.squares(x) * noise
        gain = None if gain is None else gain + weight.size(inner) * noise
    if (offset := call.token(bias)) is not None:
        own = plus(own, offset.mean())
    if passed is not None and own is None:
        own = torch.zeros_like(passed)
    return Variance(own, passed, gain)


@register_propagation("send")
def _sent(call: Call) -> Result:
    """
    Rows ``[*rows, width]`` through modules, each by itself: here all through each, as
    which they go through differs from sample to sample.
    """
    x, index, size, experts = call.args
    with call.mode:
        rows = x.detach().flatten(0, -2)
    # Stacked experts have one table for the whole batch.
    count = whole(rows).shape[:-1].numel() if experts.stacked else len(rows)

    def through(i: int) -> Any:
        to_one = torch.full((count,), i, device=x.device)
        return call.mode.token(experts(rows, Routes(to_one, size), at_once))

    with call.mode:
        every = [through(i) for i in range(size)]
    total = zeros(x, (*index.shape, 1))
    for i, variance in enumerate(every):
        if isinstance(variance, Lost):
            return variance
        variance = variance.expand(len(rows), 1).view(*index.shape, 1)
        total = torch.where((index == i).unsqueeze(-1), variance, total)
    return Variance(total)
