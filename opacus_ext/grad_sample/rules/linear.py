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
    RULES,
    Op,
    library_op,
    of_all,
    register_rule,
)
from opacus_ext.private_torch import is_batched

T = torch.Tensor
Factors = list[tuple[Factor, ...]]
# The types that autocast changes.
_CAST = {torch.float32, torch.float16, torch.bfloat16}


def _as_multiplied(input: T) -> T:
    """
    Casts the data of a sample as autocast does for a product, once for the product and
    the factors: the backward pass need not keep the data nor cast them again.
    """
    if input.dtype not in _CAST or not is_batched(input):
        return input
    if torch.compiler.is_compiling():
        return input
    return input.to(torch.get_autocast_dtype(input.device.type))


def _linear(backprops: T, activations: T) -> Factors:
    """Returns the factors of ``W [out, in]`` and its bias."""
    # What was not cast before, autocast casts for the op alone.
    activations = activations.to(backprops.dtype)
    return [(backprops, activations), (backprops,)]


def _product(backprops: T, activations: T) -> Factors:
    """Returns the factors of ``w [in, out]`` and of an added bias."""
    activations = activations.to(backprops.dtype)
    return [(activations, backprops), (backprops,)]


def _stack(backprops: T, activations: T) -> Factors:
    """Returns the factors of ``w [E, in, out]``, with ``x [E, rows, in]``."""
    samples, length, size, rows, _ = activations.shape
    numbers = torch.arange(size, device=activations.device)
    # Each row of the stack is multiplied by the matrix with the number of its block.
    index = numbers.repeat_interleave(rows).repeat(length)
    index = index.expand(samples, -1)
    matrices = OneHot(index, size)
    inputs = activations.to(backprops.dtype).flatten(1, 3)
    return [(matrices, inputs, backprops.flatten(1, 3))]


@register_rule(F.linear)
def linear(
    input: T,
    weight: T,
    bias: T | None = None,
) -> Op | None:
    """``y [*, out] = input [*, in] W^T + b``"""
    if weight.dim() != 2:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    if torch.is_autocast_enabled(input.device.type):
        input = _as_multiplied(input)
    return Op((weight, bias), (input,), _linear, run_all=_run_linear)


def _run_linear(params: Sequence[T], inputs: T) -> T:
    return F.linear(inputs, *params)


@of_all(F.linear)
def _linear_of_all(
    input: T,
    weight: T,
    bias: T | None = None,
) -> T:
    """
    Runs all samples at once. vmap would decompose a layer that samples share, and under
    autocast add a bias of float32 and return float32.
    """
    if len(weight) == 1:
        if bias is None:
            return F.linear(input, weight[0])
        if len(bias) == 1:
            return F.linear(input, weight[0], bias[0])
    if bias is None or weight.dim() != 3 or bias.dim() != 2:
        return NotImplemented
    size = max(len(input), len(weight), len(bias))
    rows = input.unsqueeze(1).flatten(1, -2)
    rows = rows.expand(size, -1, -1)
    weights = weight.mT.expand(size, -1, -1)
    # Autocast casts all three, so that the result has the dtype of a sample alone.
    outputs = torch.baddbmm(bias.unsqueeze(1), rows, weights)
    return outputs.view(size, *input.shape[1:-1], outputs.shape[2])


_op = library_op(
    "linear(Tensor x, Tensor weight, Tensor bias) -> Tensor", F.linear, _linear_of_all
)


def _linear_in_compiled(
    input: T,
    weight: T,
    bias: T | None = None,
) -> T:
    if bias is None or weight.dim() != 2 or bias.dim() != 1:
        return F.linear(input, weight, bias)
    return _op(input, weight, bias)


IN_COMPILED[F.linear] = _linear_in_compiled


@register_rule(torch.addmm, T.addmm)
def addmm(
    input: T,
    mat1: T,
    mat2: T,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Op | None:
    """``y [*, out] = input [out] + mat1 [*, in] mat2 [in, out]``"""
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    if torch.is_autocast_enabled(mat1.device.type):
        mat1 = _as_multiplied(mat1)
    return Op((mat2, input), (mat1,), _product, run_all=_run_addmm)


def _run_addmm(params: Sequence[T], inputs: T) -> T:
    weight, bias = params
    return F.linear(inputs, weight.mT, bias)


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matmul(
    input: T,
    other: T,
    **kwargs: Any,
) -> Op | None:
    """``y [*, out] = x [*, in] w [in, out]``"""
    if kwargs or other.dim() != 2:
        return None
    return Op((other, None), (input,), _product)


register_rule(T.__rmatmul__)(lambda self, other: matmul(other, self))


@register_rule(torch.bmm, T.bmm)
def bmm(input: T, mat2: T) -> Op | None:
    """``y[e] = input[e] mat2[e]``, where ``mat2`` is a parameter."""
    if not mat2.requires_grad:
        return None
    return Op((mat2,), (input,), _stack, event_dims=3, data_dims=(3,))


# -- norms -----------------------------------------------------------------------------


def _layer_norm(
    shape: Sequence[int],
    eps: float,
    backprops: T,
    inputs: T,
    *statistics: T,
) -> Factors:
    """Returns the factors of a scale and a shift ``[*shape]``."""
    if statistics:
        mean, inverse_std = statistics
        normalized = (inputs - mean) * inverse_std
    else:
        normalized = F.layer_norm(inputs, shape, eps=eps)
    # A scale's gradient is one number an entry: the factor covers all its axes.
    of_scale = normalized.to(backprops.dtype) * backprops
    of_shift = backprops
    return [(of_scale.flatten(2),), (of_shift.flatten(2),)]


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
    dims = len(shape)
    factors = partial(_layer_norm, shape, eps)

    def run_all(params: Sequence[T | None], inputs: T) -> T:
        return F.layer_norm(inputs, shape, params[0], params[1], eps)

    return Op(
        params=(weight, bias),
        data=(input,),
        factors=factors,
        event_dims=dims,
        data_dims=(dims,),
        run_all=run_all,
    )


def _compiled_layer_norm(*args: Any, **kwargs: Any) -> T:
    return F.layer_norm(*args, **kwargs)


IN_COMPILED[F.layer_norm] = _compiled_layer_norm


def _with_statistics(*args: Any, **kwargs: Any) -> Op:
    """Saves what the compiler computes once for the layer and for the gradients."""
    op: Any = layer_norm(*args, **kwargs)
    _, eps = op.factors.args
    inputs = upcast(op.data[0].detach())
    axes = list(range(-op.event_dims, 0))
    variance, mean = torch.var_mean(inputs, axes, correction=0, keepdim=True)
    data = *op.data, mean, torch.rsqrt(variance + eps)
    return op._replace(data=data, data_dims=3 * op.data_dims)


# In compiled code it is asked for, though calls of the function are not seen.
RULES[_compiled_layer_norm] = (_with_statistics,)


@of_all(F.group_norm)
def group_norm(
    input: T,
    num_groups: int,
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
) -> T:
    """
    Normalizes the channels of all samples as if they were groups of one sample. So the
    gradients of scales and shifts in torch's kernel are per-sample gradients.
    """
    size, _, channels = input.shape[:3]
    params = []
    for param in (weight, bias):
        if param is not None:
            # vmap runs samples that share the input, but not the parameters.
            if len(param) > size:
                return NotImplemented
            param = param.expand(size, channels).flatten()
        params.append(param)
    # The rows of all samples are ``[N, B * channels, *space]``.
    rows = input.transpose(0, 1).flatten(1, 2)
    scale, shift = params
    outputs = F.group_norm(rows, num_groups * size, scale, shift, eps)
    outputs = outputs.unflatten(1, (size, channels))
    # The model may take a view, as it may of the result for a sample alone.
    return outputs.transpose(0, 1).contiguous()
