"""Mixtures of experts: rows that go through matrices of their own."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    plus,
    wide,
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


@register_propagation("grouped_linear")
def _grouped_linear(call: Call) -> Result:
    """The op of ``grad_sample.rules.experts``; rows without an expert have no error."""
    x, index, weight = call.args
    group = index.clamp(max=len(weight) - 1)
    found = _by_group(call, x, group, weight, None, 1)
    none = (index >= len(weight)).unsqueeze(-1)
    return Variance(
        *(None if part is None else part.masked_fill(none, 0) for part in found)
    )


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
