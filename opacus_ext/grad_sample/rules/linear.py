"""Products with a matrix: linear layers, transformers' Conv1D, ``x @ w``."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules.registry import Op, register_rule

T = torch.Tensor
Found = List[Tuple[Factor, ...]]


def _linear(backprops: T, activations: T) -> Found:
    """Of ``W [out, in]`` and its bias."""
    # Under autocast the op computed with the cast input.
    return [(backprops, activations.to(backprops.dtype)), (backprops,)]


def _product(backprops: T, activations: T) -> Found:
    """Of ``w [in, out]`` and what is added."""
    return [(activations.to(backprops.dtype), backprops), (backprops,)]


def _first(backprops: T, activations: T) -> Found:
    """Of ``W [out, in]`` in ``W x``, with ``x [in, n]``."""
    x, g = (y.mT.flatten(1, 2) for y in (activations.to(backprops.dtype), backprops))
    return [(g, x)]


@register_rule(F.linear)
def linear(input: T, weight: T, bias: Optional[T] = None) -> Optional[Op]:
    """``y [*, out] = input [*, in] W^T + b``"""
    if weight.dim() != 2:
        return None
    return Op((weight, bias), (input,), _linear, whole=_rows_by_weight)


def _rows_by_weight(params: Sequence, x: T) -> T:
    return F.linear(x, *params)


@register_rule(torch.addmm, T.addmm)
def addmm(
    input: T, mat1: T, mat2: T, *, beta: float = 1, alpha: float = 1
) -> Optional[Op]:
    """``y [*, out] = input [out] + mat1 [*, in] mat2 [in, out]``"""
    if beta != 1 or alpha != 1 or input.dim() != 1:
        return None
    return Op((mat2, input), (mat1,), _product, whole=_rows_by_matrix)


def _rows_by_matrix(params: Sequence, x: T) -> T:
    matrix, added = params
    return F.linear(x, matrix.mT, added)


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matrix_first(input: T, other: T, **kwargs: Any) -> Optional[Op]:
    """``y = W x``, with ``W [out, in]`` and ``x [in, n]``"""
    if kwargs or input.dim() != 2 or other.dim() < 2:
        return None
    return Op((input,), (other,), _first, 2, (2,))


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matmul(input: T, other: T, **kwargs: Any) -> Optional[Op]:
    """``y [*, out] = x [*, in] w [in, out]``"""
    return None if kwargs or other.dim() != 2 else Op((other,), (input,), _product)


@register_rule(T.__rmatmul__)
def _rmatmul(self: T, other: T) -> Optional[Op]:
    return matmul(other, self)


@register_rule(T.__rmatmul__)
def rmatmul_first(self: T, other: T) -> Optional[Op]:
    """The same, with what is made of parameters first."""
    return matrix_first(other, self)


@register_rule(torch.bmm, T.bmm)
def bmm(input: T, mat2: T) -> Optional[Op]:
    """``y[e] = input[e] mat2[e]``, where the second is made of parameters."""
    return Op((mat2,), (input,), _stack, 3, (3,)) if mat2.requires_grad else None


def _stack(backprops: T, activations: T) -> Found:
    x, g = activations.to(backprops.dtype), backprops
    size, rows = x.shape[2:4]  # of [B, T, E, rows, in]
    place = torch.arange(size, device=x.device).repeat_interleave(rows)
    place = OneHot(place.repeat(x.shape[1]).expand(len(x), -1), size)
    return [(place, x.flatten(1, 3), g.flatten(1, 3))]
