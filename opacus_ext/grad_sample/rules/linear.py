"""Products with a matrix (linear layers, transformers' Conv1D, ``x @ w``), and norms.

The many copies of RMSNorm in other people's code need no rule: their scale is given to
each sample as a copy, which costs no more.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot, wide
from opacus_ext.grad_sample.rules.registry import Op, register_rule

T = torch.Tensor
Found = list[tuple[Factor, ...]]


def _linear(backprops: T, activations: T) -> Found:
    """Factors of ``W [out, in]`` and its bias."""
    # Under autocast the op computed with the cast input.
    return [(backprops, activations.to(backprops.dtype)), (backprops,)]


def _product(backprops: T, activations: T) -> Found:
    """Factors of ``w [in, out]`` and what is added."""
    return [(activations.to(backprops.dtype), backprops), (backprops,)]


def _first(backprops: T, activations: T) -> Found:
    """Factors of ``W [out, in]`` in ``W x``, with ``x [in, n]``."""
    x, g = (y.mT.flatten(1, 2) for y in (activations.to(backprops.dtype), backprops))
    return [(g, x)]


def _stack(backprops: T, activations: T) -> Found:
    """Factors of ``w [E, in, out]``, with ``x [E, rows, in]``."""
    x, g = activations.to(backprops.dtype), backprops
    size, rows = x.shape[2:4]
    place = torch.arange(size, device=x.device).repeat_interleave(rows)
    which = OneHot(place.repeat(x.shape[1]).expand(len(x), -1), size)
    return [(which, x.flatten(1, 3), g.flatten(1, 3))]


@register_rule(F.linear)
def linear(input: T, weight: T, bias: T | None = None) -> Op | None:
    """``y [*, out] = input [*, in] W^T + b``"""
    if weight.dim() != 2:
        return None
    return Op((weight, bias), (input,), _linear, whole=lambda p, x: F.linear(x, *p))


@register_rule(torch.addmm, T.addmm)
def addmm(
    input: T, mat1: T, mat2: T, *, beta: float = 1, alpha: float = 1
) -> Op | None:
    """``y [*, out] = input [out] + mat1 [*, in] mat2 [in, out]``"""
    if beta != 1 or alpha != 1 or input.dim() != 1:
        return None
    return Op(
        (mat2, input), (mat1,), _product, whole=lambda p, x: F.linear(x, p[0].mT, p[1])
    )


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matrix_first(input: T, other: T, **kwargs: Any) -> Op | None:
    """``y = W x``, with ``W [out, in]`` and ``x [in, n]``"""
    if kwargs or input.dim() != 2 or other.dim() < 2:
        return None
    return Op((input,), (other,), _first, 2, (2,))


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matmul(input: T, other: T, **kwargs: Any) -> Op | None:
    """``y [*, out] = x [*, in] w [in, out]``"""
    return None if kwargs or other.dim() != 2 else Op((other,), (input,), _product)


register_rule(T.__rmatmul__)(lambda self, other: matmul(other, self))
register_rule(T.__rmatmul__)(lambda self, other: matrix_first(other, self))


@register_rule(torch.bmm, T.bmm)
def bmm(input: T, mat2: T) -> Op | None:
    """``y[e] = input[e] mat2[e]``, where the second is made of parameters."""
    return Op((mat2,), (input,), _stack, 3, (3,)) if mat2.requires_grad else None


# -- norms: scale and shift what is normalized -----------------------------------------


# Equal for layers alike, by which uses of one kind are found.
class OfNorm(NamedTuple):
    """The factors of a norm's scale and shift; RMSNorm has the first alone."""

    function: Callable
    of: tuple[int, ...] | int  # the shape that is normalized, or the number of groups
    eps: float | None

    def op(self, params: tuple[T | None, ...], x: T, dims: int) -> Op:
        """What the rule returns."""
        return Op(params, (x,), self, dims, (dims,), self.whole)

    def whole(self, params: Sequence, x: T) -> T:
        """Runs the layer for all samples."""
        return self.function(x, self.of, *params, self.eps)

    def __call__(self, backprops: T, x: T) -> Found:
        normalized = self.function(x, self.of, eps=self.eps).to(backprops.dtype)
        return [(self._rows(normalized * backprops),), (self._rows(backprops),)]

    def _rows(self, x: T) -> T:
        if isinstance(self.of, int) and x.dim() > 3:  # [B, T, channels, *space]
            return wide(x.flatten(3)).sum(3)
        return x.flatten(2)


@register_rule(F.layer_norm)
def layer_norm(
    input: T,
    normalized_shape: Sequence[int],
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
) -> Op:
    """Scale and shift ``[*normalized_shape]``."""
    given = OfNorm(F.layer_norm, tuple(normalized_shape), eps)
    return given.op((weight, bias), input, len(normalized_shape))


@register_rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: T,
    normalized_shape: Sequence[int],
    weight: T | None = None,
    eps: float | None = None,
) -> Op:
    """Scale ``[*normalized_shape]``."""
    given = OfNorm(F.rms_norm, tuple(normalized_shape), eps)
    return given.op((weight,), input, len(normalized_shape))


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: T,
    num_groups: int,
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
    *unused: Any,
) -> Op:
    """Scale and shift ``[channels]`` of an input ``[N, channels, *space]``."""
    return OfNorm(_groups, num_groups, eps).op((weight, bias), input, input.dim() - 1)


def _groups(x: T, *args: Any, **kwargs: Any) -> T:
    """GroupNorm of ``[B, T, channels, *space]``."""
    return F.group_norm(x.flatten(0, 1), *args, **kwargs).unflatten(0, x.shape[:2])
