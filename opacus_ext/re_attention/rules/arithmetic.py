"""Sums, products, quotients, and functions of one tensor."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from opacus_ext.re_attention import moments
from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    dims_of,
    last_mean,
    mean_square,
    plus,
    wide,
    without_dims,
)


def expected(call: Call, x: Any) -> Any:
    """The value of an argument, with what a square has in excess."""
    known = call.variance(x)
    return x if known is None or known.excess is None else wide(x) + known.excess


def _left(call: Call, x: Any, norm: Any) -> Optional[Tensor]:
    """
    The share of its error that x keeps when its norm is made 1 by hand, as in
    ``rms_norm`` of ``moments``; None if ``norm`` is no such factor or divisor.
    """
    known = call.variance(norm)
    if known is None or known.excess is None or call.variance(x) is None:
        return None
    if norm.size(-1) != 1 or x.size(-1) == 1:
        return None
    value = wide(norm)
    q = (1 + known.excess / value).square()
    q = torch.minimum(q, 1 / q)  # a factor has the inverse of a divisor
    return 1 - q * (1.5 * q - 0.5) / x.size(-1)


@register_propagation("add", "sub", "rsub")
def _add(call: Call) -> Result:
    alpha = call.arg(2, "alpha", 1)
    x, y = call.args[0], call.arg(1, "other")
    a, b = call.token(x), call.token(y)
    if b is not None and alpha != 1:
        b = b * alpha**2
    known = [z for z in map(call.variance, (x, y)) if z is not None]
    # Of a sum of squares and what makes it positive.
    excess = known[0].excess if len(known) == 1 and call.name == "add" else None
    return Variance(plus(a, b), excess=excess)


@register_propagation("mul")
def _mul(call: Call) -> Result:
    x, y = call.args[0], call.arg(1, "other")
    a, b = call.token(x), call.token(y)
    if (left := _left(call, x, y)) is not None:
        return Variance(a * left * mean_square(expected(call, y), call.out))
    if (left := _left(call, y, x)) is not None:
        return Variance(b * left * mean_square(expected(call, x), call.out))
    x, y = expected(call, x), expected(call, y)
    total = None
    if a is not None:
        factor = mean_square(y, call.out)
        total = a * (factor if b is None else factor + b)
    if b is not None:
        total = plus(total, b * mean_square(x, call.out))
    return Variance(total)


@register_propagation("div")
def _div(call: Call) -> Result:
    x, y = call.args[0], call.arg(1, "other")
    a, b = call.token(x), call.token(y)
    if not isinstance(y, Tensor):
        return Variance(a / y**2)
    inverse = 1 / wide(expected(call, y))
    if (left := _left(call, x, y)) is not None:
        return Variance(a * left * mean_square(inverse, call.out))
    total = None if a is None else a * mean_square(inverse, call.out)
    if b is not None:  # to first order
        slope = (wide(x) if isinstance(x, Tensor) else x) * inverse * inverse
        total = plus(total, b * mean_square(slope, slope))
    return Variance(total)


@register_propagation("mean", "sum")
def _total(call: Call) -> Result:
    x = call.args[0]
    dims = dims_of(x, call.arg(1, "dim", call.kwargs.get("axis")))
    variance = call.token(x)
    excess = call.variance(x).excess
    variance = variance.expand(*x.shape[:-1], 1 if x.dim() > 1 else -1)
    number = 1
    for dim in dims:
        number *= x.size(dim)
        if dim < x.dim() - 1 or variance.size(dim) > 1:
            variance = variance.sum(dim, keepdim=True)
        else:
            variance = variance * x.size(dim)
    if call.name == "mean":
        variance = variance / max(number, 1) ** 2
    keep = call.arg(2, "keepdim", False)
    if excess is not None:
        excess = last_mean(excess) if keep and dims == [x.dim() - 1] else None
        if excess is not None and call.name == "sum":
            excess = excess * x.size(-1)
    return Variance(variance if keep else without_dims(variance, dims), excess=excess)


_FIRST_ORDER = (
    "tanh sigmoid exp expm1 log log1p sqrt rsqrt reciprocal square pow erf softplus "
    "elu leaky_relu hardswish"
).split()


@register_propagation("relu", "gelu", "silu")
def _activation(call: Call) -> Result:
    return Variance(getattr(moments, call.name)(call.moments(call.args[0])))


@register_propagation(*_FIRST_ORDER)
def _elementwise(call: Call) -> Result:
    """To first order: the derivative, squared, at the value."""
    x, *rest = call.args
    known = call.variance(x)
    if known is None or any(call.variance(y) is not None for y in rest):
        return Lost(call.name)
    variance = known.token()
    if call.name == "square" or (call.name == "pow" and call.arg(1, "exponent") == 2):
        own = variance * (4 * mean_square(x, x) + 2 * variance)
        return Variance(own, excess=variance)
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("inplace", "out")}
    plain = call.func
    if plain.__name__.endswith("_"):  # in place, or an operator
        plain = getattr(Tensor, call.name, None) or getattr(F, call.name)
    value = wide(expected(call, x))
    y, slope = torch.func.jvp(
        lambda value: plain(value, *rest, **kwargs), (value,), (torch.ones_like(value),)
    )
    excess = None if known.excess is None else y - wide(call.out)
    return Variance(variance * mean_square(slope, slope), excess=excess)


@register_propagation("dropout")
def _dropout(call: Call) -> Result:
    p, training = call.arg(1, "p", 0.5), call.arg(2, "training", True)
    variance = call.token(call.args[0])
    # The draw is made, and no part of the error; on average over it:
    return Variance(variance / (1 - p) if training and p < 1 else variance)


@register_propagation("softmax")
def _softmax(call: Call) -> Result:
    variance, dim = call.token(call.args[0]), call.arg(1, "dim", -1)
    p = wide(call.out).movedim(dim, -1)
    squares = p.square()
    total = squares * (1 - 2 * p + squares.sum(-1, keepdim=True))
    return Variance(variance * last_mean(total.movedim(-1, dim)))
