"""LayerNorm, RMSNorm and GroupNorm: scale and shift what is normalized.

The many copies of RMSNorm in other people's code need no rule: their scale is given to
each sample as a copy, which costs no more.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, wide
from opacus_ext.grad_sample.rules.registry import Op, register_rule

T = torch.Tensor


# Equal for layers alike, by which uses of one kind are found.
class OfNorm(NamedTuple):
    """The factors of LayerNorm, and of RMSNorm, which has the first of them."""

    function: Callable
    shape: Tuple[int, ...]
    eps: Optional[float]

    def op(self, params: Tuple[Optional[T], ...], x: T) -> Op:
        """What the rule says."""
        dims = len(self.shape)
        return Op(params, (x,), self, dims, (dims,), self.whole)

    def whole(self, params: Sequence, x: T) -> T:
        """The layer for all samples."""
        return self.function(x, self.shape, *params, self.eps)

    def __call__(self, backprops: T, x: T) -> List[Tuple[Factor, ...]]:
        normalized = self.function(x, self.shape, eps=self.eps).to(backprops.dtype)
        return [((normalized * backprops).flatten(2),), (backprops.flatten(2),)]


@register_rule(F.layer_norm)
def layer_norm(
    input: T,
    normalized_shape: Sequence[int],
    weight: Optional[T] = None,
    bias: Optional[T] = None,
    eps: float = 1e-5,
) -> Op:
    """Scale and shift ``[*normalized_shape]``."""
    return OfNorm(F.layer_norm, tuple(normalized_shape), eps).op((weight, bias), input)


@register_rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: T,
    normalized_shape: Sequence[int],
    weight: Optional[T] = None,
    eps: Optional[float] = None,
) -> Op:
    """Scale ``[*normalized_shape]``."""
    return OfNorm(F.rms_norm, tuple(normalized_shape), eps).op((weight,), input)


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: T,
    num_groups: int,
    weight: Optional[T] = None,
    bias: Optional[T] = None,
    eps: float = 1e-5,
    *unused: Any,
) -> Op:
    """Scale and shift ``[channels]`` of an input ``[N, channels, *space]``."""
    given, event = OfGroups(num_groups, eps), input.dim() - 1
    return Op((weight, bias), (input,), given, event, (event,), given.whole)


class OfGroups(NamedTuple):
    """The factors of GroupNorm."""

    groups: int
    eps: float

    def whole(self, params: Sequence, x: T) -> T:
        """The layer for all samples."""
        y = F.group_norm(x.flatten(0, 1), self.groups, *params, self.eps)
        return y.unflatten(0, x.shape[:2])

    def __call__(self, backprops: T, x: T) -> List[Tuple[Factor, ...]]:
        scale = self.whole((None, None), x).to(backprops.dtype) * backprops
        return [(_over_space(scale),), (_over_space(backprops),)]


def _over_space(x: T) -> T:
    """``[B, T, channels, *space]`` to ``[B, T, channels]``."""
    return wide(x.flatten(3)).sum(3) if x.dim() > 3 else x
