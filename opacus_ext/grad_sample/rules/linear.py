"""Products with a matrix (linear layers, transformers' Conv1D, ``x @ w``), and norms.

RMSNorm needs no rule: per-sample copies of its scale are as fast.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot, upcast
from opacus_ext.grad_sample.rules.registry import (
    IN_COMPILED,
    Op,
    library_op,
    of_all,
    register_rule,
)

T = torch.Tensor
Found = list[tuple[Factor, ...]]


def _linear(backprops: T, activations: T) -> Found:
    """Returns the factors of ``W [out, in]`` and its bias."""
    # Under autocast the op uses the cast input.
    return [(backprops, activations.to(backprops.dtype)), (backprops,)]


def _product(backprops: T, activations: T) -> Found:
    """Returns the factors of ``w [in, out]`` and of an added bias."""
    return [(activations.to(backprops.dtype), backprops), (backprops,)]


def _stack(backprops: T, activations: T) -> Found:
    """Returns the factors of ``w [E, in, out]``, with ``x [E, rows, in]``."""
    x, g = activations.to(backprops.dtype), backprops
    size, rows = x.shape[2:4]
    place = torch.arange(size, device=x.device).repeat_interleave(rows)
    which = OneHot(place.repeat(x.shape[1]).expand(len(x), -1), size)
    return [(which, x.flatten(1, 3), g.flatten(1, 3))]


@register_rule(F.linear)
def linear(input: T, weight: T, bias: T | None = None) -> Op | None:
    """``y [*, out] = input [*, in] W^T + b``"""
    if weight.dim() != 2 or bias is not None and bias.shape != weight.shape[:1]:
        return None
    given = (weight, bias), (input,), _linear
    return Op(*given, run_all=lambda params, x: F.linear(x, *params))


@of_all(F.linear)
def _linear_of_all(input: T, weight: T, bias: T | None = None) -> T:
    """
    Runs all samples: vmap would take a layer that they share apart, and under autocast
    add a bias of float32, and return float32.
    """
    if len(weight) == 1 and (bias is None or len(bias) == 1):
        return F.linear(input, weight[0], None if bias is None else bias[0])
    if bias is None or weight.dim() != 3 or bias.dim() != 2:
        return NotImplemented
    x, count = input, max(map(len, (input, weight, bias)))
    rows = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
    rows, weight = (y.expand(count, -1, -1) for y in (rows, weight.mT))
    y = torch.baddbmm(bias.unsqueeze(1), rows, weight)  # autocast casts the bias, too
    return y.view(count, *x.shape[1:-1], y.shape[2])


_op = library_op(
    "linear(Tensor x, Tensor weight, Tensor bias) -> Tensor", F.linear, _linear_of_all
)


def _linear_in_compiled(input: T, weight: T, bias: T | None = None) -> T:
    plain = bias is None or weight.dim() != 2 or bias.dim() != 1
    return F.linear(input, weight, bias) if plain else _op(input, weight, bias)


IN_COMPILED[F.linear] = _linear_in_compiled


@register_rule(torch.addmm, T.addmm)
def addmm(
    input: T, mat1: T, mat2: T, *, beta: float = 1, alpha: float = 1
) -> Op | None:
    """``y [*, out] = input [out] + mat1 [*, in] mat2 [in, out]``"""
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    given = (mat2, input), (mat1,), _product
    return Op(*given, run_all=lambda params, x: F.linear(x, params[0].mT, params[1]))


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matmul(input: T, other: T, **kwargs: Any) -> Op | None:
    """``y [*, out] = x [*, in] w [in, out]``"""
    return None if kwargs or other.dim() != 2 else Op((other,), (input,), _product)


register_rule(T.__rmatmul__)(lambda self, other: matmul(other, self))


@register_rule(torch.bmm, T.bmm)
def bmm(input: T, mat2: T) -> Op | None:
    """``y[e] = input[e] mat2[e]``, where ``mat2`` is a parameter."""
    return Op((mat2,), (input,), _stack, 3, (3,)) if mat2.requires_grad else None


# -- norms -----------------------------------------------------------------------------


def _layer_norm(
    shape: Sequence[int], eps: float, backprops: T, x: T, *statistics: T
) -> Found:
    """Returns the factors of a scale and a shift ``[*shape]``."""
    if statistics:
        mean, rstd = statistics
        normalized = (x - mean) * rstd
    else:
        normalized = F.layer_norm(x, shape, eps=eps)
    normalized = normalized.to(backprops.dtype)
    return [((normalized * backprops).flatten(2),), (backprops.flatten(2),)]


@register_rule(F.layer_norm)
def layer_norm(
    input: T,
    normalized_shape: Sequence[int],
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
) -> Op:
    """Scale and shift ``[*normalized_shape]``."""
    shape = tuple(normalized_shape)
    dims, factors = len(shape), partial(_layer_norm, shape, eps)

    def run_all(params: Sequence[T | None], x: T) -> T:
        return F.layer_norm(x, shape, params[0], params[1], eps)

    return Op((weight, bias), (input,), factors, dims, (dims,), run_all)


def _compiled_layer_norm(*args: Any, **kwargs: Any) -> T:
    return F.layer_norm(*args, **kwargs)


IN_COMPILED[F.layer_norm] = _compiled_layer_norm


@register_rule(_compiled_layer_norm)
def _with_statistics(*args: Any, **kwargs: Any) -> Op:
    """Saves what the compiler computes once for the layer and for the gradients."""
    op: Any = layer_norm(*args, **kwargs)
    x, axes = upcast(op.data[0].detach()), [*range(-op.event_dims, 0)]
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    data = *op.data, mean, torch.rsqrt(var + op.factors.args[1])
    return op._replace(data=data, data_dims=3 * op.data_dims)


@of_all(F.group_norm)
def group_norm(
    input: T,
    num_groups: int,
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
) -> T:
    """
    Normalizes the channels of all samples as the groups of one, in torch's kernel,
    whose gradients of scales and shifts are per-sample gradients then.
    """
    x, size, channels = input, *input.shape[0:3:2]
    if any(y is not None and len(y) > size for y in (weight, bias)):
        return NotImplemented
    joined = x.transpose(0, 1).flatten(1, 2)  # [N, B * channels, *space]
    scale, shift = (
        None if y is None else y.expand(size, channels).flatten()
        for y in (weight, bias)
    )
    y = F.group_norm(joined, num_groups * size, scale, shift, eps)
    y = y.unflatten(1, (size, channels)).transpose(0, 1)
    return y.contiguous()  # as of a sample alone, who may take a view
