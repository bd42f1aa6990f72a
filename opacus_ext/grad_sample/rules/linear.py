"""Products with a matrix: linear layers, transformers' Conv1D, ``x @ w``."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from opacus_ext.grad_sample.factors import Blocks, Factor
from opacus_ext.grad_sample.rules.registry import (
    Factors,
    Op,
    is_shared,
    register_op,
)

Found = List[Tuple[Factor, ...]]


def _linear(backprops: torch.Tensor, activations: torch.Tensor) -> Found:
    """Of ``W [out, in]`` and its bias."""
    # Under autocast the op computed with the cast input.
    return [(backprops, activations.to(backprops.dtype)), (backprops,)]


def _product(backprops: torch.Tensor, activations: torch.Tensor) -> Found:
    """Of ``w [in, out]`` and what is added."""
    return [(activations.to(backprops.dtype), backprops), (backprops,)]


@register_op(F.linear)
def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> Optional[Op]:
    """``y [*, out] = input [*, in] W^T + b``"""
    if weight.dim() != 2 or not is_shared(weight):
        return None
    if bias is not None and not is_shared(bias):
        return None
    return Op((weight, bias), (input,), _linear, 1, (1,), _rows_by_weight)


def _rows_by_weight(params: Sequence, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, *params)


@register_op(torch.addmm, torch.Tensor.addmm)
def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Optional[Op]:
    """``y [*, out] = input [out] + mat1 [*, in] mat2 [in, out]``"""
    if beta != 1 or alpha != 1 or mat1.dim() != 2 or not is_shared(mat2):
        return None
    if not is_shared(input) or input.dim() != 1 or mat1.requires_grad:
        return None
    return Op((mat2, input), (mat1,), _product, 1, (1,), _rows_by_matrix)


def _rows_by_matrix(params: Sequence, x: torch.Tensor) -> torch.Tensor:
    matrix, added = params
    return F.linear(x, matrix.mT, added)


def _rows_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """``[B, T, E, n, width]`` as ``[B, E * T * n, width]``, block after block."""
    return x.transpose(1, 2).flatten(1, 3)


def _stack(backprops: torch.Tensor, activations: torch.Tensor) -> Found:
    size = activations.shape[2]
    x, g = (_rows_of_blocks(y) for y in (activations.to(backprops.dtype), backprops))
    return [(Blocks(size), x, g)]


def _stack_first(backprops: torch.Tensor, activations: torch.Tensor) -> Found:
    size = activations.shape[2]
    x, g = (_rows_of_blocks(y.mT) for y in (activations.to(backprops.dtype), backprops))
    return [(Blocks(size), g, x)]


def _first(backprops: torch.Tensor, activations: torch.Tensor) -> Found:
    """Of ``W [out, in]`` in ``W x``, with ``x [in, n]``."""
    x, g = (y.mT.flatten(1, 2) for y in (activations.to(backprops.dtype), backprops))
    return [(g, x)]


@register_op(
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.Tensor.mm,
    torch.bmm,
    torch.Tensor.bmm,
)
def matmul(input: torch.Tensor, other: torch.Tensor, **kwargs: object) -> Optional[Op]:
    """``y = input other``, where one of them is made of parameters."""
    if kwargs:
        return None
    x, w = input, other
    if is_shared(w) and w.requires_grad and not (is_shared(x) and x.requires_grad):
        if w.dim() == 2 and x.dim() >= 1:
            return Op((w,), (x,), _product, 1, (1,))
        if w.dim() == 3 and x.dim() == 3 and len(x) == len(w):
            return Op((w,), (x,), _stack, 3, (3,))
    w, x = input, other
    if is_shared(w) and w.requires_grad and not (is_shared(x) and x.requires_grad):
        if w.dim() == 2 and x.dim() >= 2:
            return Op((w,), (x,), _first, 2, (2,))
        if w.dim() == 3 and x.dim() == 3 and len(x) == len(w):
            return Op((w,), (x,), _stack_first, 3, (3,))
    return None


@register_op(torch.Tensor.__rmatmul__)
def rmatmul(self: torch.Tensor, other: torch.Tensor) -> Optional[Op]:
    """``y = other self``"""
    return matmul(other, self)


@register_op(F.bilinear)
def bilinear(
    input1: torch.Tensor,
    input2: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
) -> Optional[Op]:
    """``y[o] = input1^T W[o] input2 + b[o]``: a factor for each axis of the weight."""
    if not is_shared(weight) or (bias is not None and not is_shared(bias)):
        return None

    def factors(
        backprops: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> Found:
        first, second = first.to(backprops.dtype), second.to(backprops.dtype)
        return [(backprops, first, second), (backprops,)]

    return Op((weight, bias), (input1, input2), factors, 1, (1, 1))


# -- inside a stand-in (registry.register_forward) -----------------------------------


def linear_factors(
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    activations: torch.Tensor,
    backprops: torch.Tensor,
) -> Factors:
    """
    Factors of ``F.linear(activations, weight, bias)``.

    Args:
        activations: ``[B, T, in_features]``
        backprops: ``[B, T, out_features]``
    """
    found = dict(zip((weight, bias), _linear(backprops, activations)))
    found.pop(None, None)
    return found
