"""Activations and other functions of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from opacus_ext.re_attention import moments
from opacus_ext.re_attention.rules.arithmetic import expected
from opacus_ext.re_attention.rules.registry import Call, Result, register_propagation
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    last_mean,
    mean_square,
    wide,
)

_FIRST_ORDER = (
    "tanh sigmoid exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal square pow sin "
    "cos erf softplus elu selu celu mish leaky_relu hardtanh hardswish hardsigmoid "
    "relu6 log_sigmoid softsign tanhshrink float_power"
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


@register_propagation("dropout", "feature_alpha_dropout")
def _dropout(call: Call) -> Result:
    p, training = call.arg(1, "p", 0.5), call.arg(2, "training", True)
    variance = call.token(call.args[0])
    # The draw is made, and no part of the error; on average over it:
    return Variance(variance / (1 - p) if training and p < 1 else variance)


@register_propagation("softmax", "log_softmax")
def _softmax(call: Call) -> Result:
    variance, p = call.token(call.args[0]), wide(call.out)
    dim = call.arg(1, "dim", -1)
    if call.name == "log_softmax":
        return Variance(variance)
    p = p.movedim(dim, -1)
    squares = p.square()
    total = squares * (1 - 2 * p + squares.sum(-1, keepdim=True))
    return Variance(variance * last_mean(total.movedim(-1, dim)))
