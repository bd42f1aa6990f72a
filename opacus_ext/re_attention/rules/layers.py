"""Embeddings, products of matrices (experts' among them), convolutions and norms."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from opacus_ext.re_attention import moments
from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import Lost, Variance, plus, squares, wide


@register_propagation("embedding")
def _embedding(call: Call) -> Result:
    if not isinstance(call.args[0], Tensor) or call.args[0].is_floating_point():
        return Lost("embedding")
    ids, rows = call.args[0], call.token(call.arg(1, "weight"))
    if rows.dim() < 2 or rows.size(0) == 1:
        return Variance(rows.reshape((1,) * (ids.dim() + 1)))
    return Variance(F.embedding(ids, rows))


@register_propagation("linear")
def _linear(call: Call) -> Result:
    """Lemma D.1, with the gain of each output kept apart."""
    x, weight, bias = call.named("input weight bias")
    return product(call, x, wide(weight), call.token(weight), bias, -1)


def product(
    call: Call,
    x: Tensor,
    weight: Tensor,
    noise: Optional[Tensor],
    bias: Optional[Tensor],
    inner: int,
) -> Variance:
    """x times a matrix whose dimension ``inner`` is summed over."""
    own = passed = gain = None
    if noise is not None:
        noise = noise.mean()
        own = squares(x) * noise
    if (offset := call.token(bias)) is not None:
        # What addmm adds may be the batch's: only a vector is one of outputs.
        own = plus(own, offset.mean() if bias.dim() < 2 else offset)
    if (passed := call.token(x)) is not None:
        passed = passed.mean(-1, keepdim=True) if x.dim() == 1 else passed
        gain = weight.square().sum(inner)
        if noise is not None:
            gain = gain + weight.size(inner) * noise
        if own is None:
            own = torch.zeros_like(passed)
    return Variance(own, passed, gain)


@register_propagation("addmm")
def _addmm(call: Call) -> Result:
    bias, x, weight = call.named("input mat1 mat2")
    if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
        return Lost("addmm")
    return product(call, x, wide(weight), call.token(weight), bias, -2)


@register_propagation("conv1d", "conv2d", "conv3d")
def _conv(call: Call) -> Result:
    """
    A linear layer at every place: one variance ``[B, 1, *places]`` a place, the mean
    over channels.
    """
    x, weight, bias = call.named("input weight bias")
    names = ("stride", "padding", "dilation")
    options = {
        n: v for i, n in enumerate(names) if (v := call.arg(3 + i, n)) is not None
    }
    groups = call.arg(6, "groups", 1)
    if x.dim() != weight.dim():
        return Lost(call.name)
    noise, passed, offset = (call.token(z) for z in (weight, x, bias))
    # The mean over a group's outputs, [groups, in / groups, *kernel].
    gain = wide(weight).square().unflatten(0, (groups, -1)).mean(1)
    total = None if offset is None else offset.mean()
    if noise is not None:
        ones = torch.ones_like(gain) * noise.mean()
        gain = gain + noise.mean()
        total = plus(
            total, call.func(wide(x).square(), ones, None, **options, groups=groups)
        )
    if passed is not None:
        known = passed.expand(x.shape)
        total = plus(total, call.func(known, gain, None, **options, groups=groups))
    return Variance(total.mean(1, keepdim=True) if total.dim() else total)


@register_propagation("matmul")
def _matmul(call: Call) -> Result:
    x, y = call.args[0], call.arg(1, "other", call.kwargs.get("mat2"))
    if min(x.dim(), y.dim()) < 2:
        return Lost("matmul")
    if y.dim() == 2:
        return product(call, x, wide(y), call.token(y), None, -2)
    a, b = call.token(x), call.token(y)
    total = None
    if b is not None:  # [*, k, 1]
        b = b.expand(*b.shape[:-2], y.size(-2), 1)
        total = wide(x).square() @ b
    if a is not None:
        gain = wide(y).square().sum((-2, -1))[..., None, None] / max(y.size(-1), 1)
        if b is not None:
            gain = gain + b.sum(-2, keepdim=True)
        total = plus(total, a * gain)
    return Variance(total)


@register_propagation("layer_norm", "rms_norm")
def _norm(call: Call) -> Result:
    x, shape, weight = call.named("input normalized_shape weight")
    if len(shape) != 1:
        return Lost(call.name)
    noise, x = call.token(weight), call.moments(x)
    if call.name == "rms_norm":
        eps = call.arg(3, "eps")
        return Variance(moments.norm(x, weight, eps, noise, centered=False))
    offset, eps = call.token(call.arg(3, "bias")), call.arg(4, "eps", 1e-5)
    return Variance(moments.norm(x, weight, eps, noise, offset))


@register_propagation("grouped_mm", "grouped_mm_fallback")
def _grouped_mm(call: Call) -> Result:
    """Rows ``[rows, in]`` times the matrix ``[in, out]`` of their group each."""
    x, weight, *rest = call.args
    ends = rest[0] if rest else call.kwargs.get("offs")
    if x.dim() != 2 or weight.dim() != 3 or ends is None or call.kwargs.get("bias"):
        return Lost("grouped_mm")
    rows = torch.arange(len(x), device=x.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True).clamp(max=len(weight) - 1)
    return _by_group(call, x, group, weight)


@register_propagation("grouped_linear")
def _grouped_linear(call: Call) -> Result:
    """The op of ``grad_sample.rules.experts``; rows without an expert have no error."""
    x, index, weight, *transposed = call.args
    group = index.clamp(max=len(weight) - 1)
    found = _by_group(call, x, group, weight, *transposed)
    none = (index >= len(weight)).unsqueeze(-1)
    return Variance(
        *(None if part is None else part.masked_fill(none, 0) for part in found)
    )


def _by_group(
    call: Call, x: Tensor, group: Tensor, weight: Tensor, transposed: bool = False
) -> Variance:
    """:func:`product` of rows ``[rows, in]`` with the matrix of their group each."""
    into = 2 if transposed else 1
    noise, passed, own = call.token(weight), call.token(x), None
    gain = wide(weight).square().sum(into)[group] if passed is not None else None
    if noise is not None:
        noise = noise.expand(*weight.shape[:2], 1).mean((1, 2))[group].unsqueeze(-1)
        own = squares(x) * noise
        gain = None if gain is None else gain + weight.size(into) * noise
    elif passed is not None:
        own = torch.zeros_like(passed)
    return Variance(own, passed, gain)
