"""Operations that put tensors together, or choose from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    compact,
    dims_of,
    last_mean,
    plus,
    tensors,
    without_dims,
    zeros,
)


@register_propagation("cat", "stack")
def _joined(call: Call) -> Result:
    xs = [x for x in call.args[0] if x.shape != (0,)]  # those stand for nothing
    out_dim = call.out.dim()
    dim = call.arg(1, "dim", 0) % out_dim
    last = out_dim - 1
    tokens = [call.token(x) for x in xs]
    variances = [zeros(x, (1,)) if v is None else v for x, v in zip(xs, tokens)]
    upright = any(v.dim() == 1 and v.size(0) > 1 for v in variances)
    if upright and out_dim > 1 and dim < last:
        return Lost(call.name)
    if dim == last and out_dim == 1:
        return Variance(torch.cat([v.expand(x.shape) for v, x in zip(variances, xs)]))
    if dim == last and call.name == "cat":
        # The mean over the new last dimension.
        weights = [x.size(-1) / max(call.out.size(-1), 1) for x in xs]
        return Variance(sum(w * v for w, v in zip(weights, variances)))
    if dim == last:
        return Variance(sum(v for v in variances).unsqueeze(-1) / len(xs))
    wide = [v.expand(*x.shape[:-1], 1) for v, x in zip(variances, xs)]
    return Variance(compact(call.func(wide, dim)))


@register_propagation("where")
def _where(call: Call) -> Result:
    condition, x, y = call.named("condition input other")
    if condition.dtype != torch.bool:  # the method x.where(condition, y)
        condition, x = x, condition
    a, b = call.token(x), call.token(y)
    zero = torch.zeros((), device=call.out.device)
    chosen = torch.where(condition, zero if a is None else a, zero if b is None else b)
    return Variance(last_mean(chosen))


@register_propagation("masked_fill")
def _masked_fill(call: Call) -> Result:
    variance = call.token(call.args[0])
    if variance is None:
        return None
    left = call.arg(1, "mask").logical_not().to(variance.dtype)
    return Variance(variance * last_mean(left))


@register_propagation("topk", "max", "min")
def _chosen(call: Call) -> Result:
    """Some of the elements along a dimension: on average as all of them."""
    x, y, out = call.args[0], call.arg(1, "other"), tensors(call.out)[0]
    if isinstance(y, Tensor):  # the larger one, whichever is chosen
        one, two = call.token(x), call.token(y)
        both = one is not None and two is not None
        return Variance(torch.maximum(one, two) if both else plus(one, two))
    at, default = (2, -1) if call.name == "topk" else (1, None)
    dims = dims_of(x, call.arg(at, "dim", default))
    variance = call.moments(x).variance
    variance = variance.expand(*x.shape[:-1], 1) if x.dim() > 1 else variance
    for dim in dims:
        variance = variance.mean(dim, keepdim=True)
    return Variance(without_dims(variance, dims) if out.dim() < x.dim() else variance)


@register_propagation("setitem", "scatter", "index_add", "masked_scatter")
def _placed(call: Call) -> Result:
    """Tokens, or elements, put or added where an index or a mask says."""
    if call.kwargs:  # scaled by alpha, reduced
        return Lost(call.name)
    x, *at, source = call.args
    by_row = call.name == "index_add" and at[0] % x.dim() != x.dim() - 1

    def every(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return 0.0
        known = call.variance(y)
        variance = zeros(y, (1,) * y.dim())
        if isinstance(known, Variance):
            variance = known.every() if call.name == "setitem" else known.token()
        return variance.expand((*y.shape[:-1], 1) if by_row else y.shape)

    if call.name == "setitem":  # a later one may set the rest of the width
        made = every(x).clone()
        made[at[0]] = every(source)
        return Variance(made)
    made = getattr(Tensor, call.name)(every(x), *at, every(source))
    return Variance(last_mean(made))
