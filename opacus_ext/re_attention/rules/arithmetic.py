"""Sums, products, quotients and statistics."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

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
    return _quotient(call, call.args[0], call.arg(1, "other"))


@register_propagation("rdiv")
def _rdiv(call: Call) -> Result:
    return _quotient(call, call.args[1], call.args[0])


def _quotient(call: Call, x: Any, y: Any) -> Result:
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


@register_propagation("addcmul")
def _addcmul(call: Call) -> Result:
    names = ("input", "tensor1", "tensor2")
    x, y, z = (call.arg(i, n) for i, n in enumerate(names))
    product = _mul(call._replace(args=(y, z)))
    own = product.own * call.kwargs.get("value", 1) ** 2
    return Variance(plus(call.token(x), own))


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


@register_propagation(
    "var", "std", "norm", "linalg_vector_norm", "var_mean", "std_mean"
)
def _statistic(call: Call) -> Result:
    """Over the width: it hardly errs, but all errors together make it larger."""
    x, both = call.args[0], call.name.endswith("_mean")
    y = call.out[0] if both else call.out
    squared = call.token(x)
    if "norm" in call.name:
        squared = squared * x.size(-1)
    if y.dim() != x.dim() or y.shape[:-1] != x.shape[:-1]:
        return [None] * (1 + both)
    value, excess = wide(y), squared
    if not call.name.startswith("var"):
        excess = (value.square() + squared).sqrt() - value
    known = Variance(torch.zeros_like(squared), excess=excess)
    return [known, Variance(call.token(x) / x.size(-1))] if both else known


@register_propagation("logsumexp")
def _logsumexp(call: Call) -> Result:
    """To first order: the derivative is a softmax."""
    x, dims = call.args[0], dims_of(call.args[0], call.arg(1, "dim"))
    variance = call.token(x).expand(*x.shape[:-1], 1 if x.dim() > 1 else -1)
    if len(dims) > 1:
        return Lost("logsumexp")
    squares = torch.softmax(wide(x), dims[0]).square()
    total = (squares * variance).sum(dims, keepdim=True)
    if call.arg(2, "keepdim", False):
        return Variance(last_mean(total))
    return Variance(last_mean(total.squeeze(dims[0])))


@register_propagation("cumsum")
def _cumsum(call: Call) -> Result:
    x = call.args[0]
    return Variance(last_mean(call.token(x).expand(x.shape).cumsum(call.arg(1, "dim"))))
