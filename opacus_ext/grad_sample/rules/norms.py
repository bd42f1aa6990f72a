"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm: scale and shift what is normalised.

The many copies of RMSNorm in other people's code need no rule: their scale is given to
each sample as a copy, which costs no more.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from opacus_ext.grad_sample.factors import Factor, wide
from opacus_ext.grad_sample.rules.registry import Op, is_shared, register_op


def _both(normalised: torch.Tensor, backprops: torch.Tensor, dim: int) -> List:
    """
    Args:
        normalised: the input without scale and shift, as ``backprops``; written over
        backprops: ``[B, T, *event]``
        dim: where the event begins
    """
    scale = normalised.mul_(backprops).flatten(dim)
    return [(scale,), (backprops.flatten(dim),)]


@register_op(F.layer_norm)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> Optional[Op]:
    """Scale and shift ``[*normalized_shape]``."""
    if any(p is not None and not is_shared(p) for p in (weight, bias)):
        return None

    count, factors = len(normalized_shape), _of_layer(tuple(normalized_shape), eps)

    def whole(params: Sequence, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, normalized_shape, *params, eps)

    return Op((weight, bias), (input,), factors, count, (count,), whole)


@functools.lru_cache(maxsize=None)  # one for all layers alike: taken together
def _of_layer(shape: Tuple[int, ...], eps: float) -> Callable[..., List]:
    def factors(backprops: torch.Tensor, x: torch.Tensor) -> List[Tuple[Factor, ...]]:
        normalised = F.layer_norm(x, shape, eps=eps).to(backprops.dtype)
        return _both(normalised, backprops, 2)

    return factors


@register_op(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[torch.Tensor] = None,
    eps: Optional[float] = None,
) -> Optional[Op]:
    """Scale ``[*normalized_shape]``."""
    if weight is None or not is_shared(weight):
        return None

    count, factors = len(normalized_shape), _of_rms(tuple(normalized_shape), eps)

    def whole(params: Sequence, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, normalized_shape, *params, eps)

    return Op((weight,), (input,), factors, count, (count,), whole)


@functools.lru_cache(maxsize=None)
def _of_rms(shape: Tuple[int, ...], eps: Optional[float]) -> Callable[..., List]:
    def factors(backprops: torch.Tensor, x: torch.Tensor) -> List[Tuple[Factor, ...]]:
        normalised = F.rms_norm(x, shape, eps=eps).to(backprops.dtype)
        return _both(normalised, backprops, 2)[:1]

    return factors


def _over_space(x: torch.Tensor) -> torch.Tensor:
    """``[B, T, channels, *space]`` -> ``[B, T, channels]``"""
    return wide(x.flatten(3)).sum(3) if x.dim() > 3 else x


@register_op(F.group_norm, torch.group_norm)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
    *unused: Any,
) -> Optional[Op]:
    """Scale and shift ``[channels]`` of an input ``[N, channels, *space]``."""
    if any(p is not None and not is_shared(p) for p in (weight, bias)):
        return None

    def factors(backprops: torch.Tensor, x: torch.Tensor) -> List[Tuple[Factor, ...]]:
        normalised = F.group_norm(x.flatten(0, 1), num_groups, eps=eps)
        normalised = normalised.view_as(backprops).to(backprops.dtype)
        scale = _over_space(normalised.mul_(backprops))
        return [(scale,), (_over_space(backprops),)]

    count = input.dim() - 1
    return Op((weight, bias), (input,), factors, count, (count,))
