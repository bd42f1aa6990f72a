"""Norms over features and over groups of channels.

RMSNorm needs no rule: per-sample copies of its scale are as fast.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.rules.registry import Op, handles, register_rule

T = torch.Tensor
Found = list[tuple[Factor, ...]]


class OfLayerNorm(NamedTuple):  # equal for equal layers, so that uses are bundled
    """The factors of a scale and a shift ``[*shape]``."""

    shape: tuple[int, ...]
    eps: float

    def whole(self, params: Sequence, x: T) -> T:
        """Runs the layer for all samples."""
        weight, bias = params
        return F.layer_norm(x, self.shape, weight, bias, self.eps)

    def __call__(self, backprops: T, x: T) -> Found:
        normalized = F.layer_norm(x, self.shape, eps=self.eps).to(backprops.dtype)
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
    given, dims = OfLayerNorm(tuple(normalized_shape), eps), len(normalized_shape)
    return Op((weight, bias), (input,), given, dims, (dims,), given.whole)


@handles(F.group_norm)
def group_norm(
    group: Any,
    func: Callable,
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
    if not (group.eager and group.is_batched(input)):
        return group.call(func, input, num_groups, weight, bias, eps)
    copies = [None if x is None else group.inner(group.own(x)) for x in (weight, bias)]
    x = group.inner(input)
    with group.outside():
        joined = x.transpose(0, 1).flatten(1, 2)  # [N, B * channels, *space]
        given = [None if y is None else y.flatten() for y in copies]
        y = func(joined, num_groups * len(x), *given, eps)
        return group.wrap(y.unflatten(1, x.shape[0:3:2]).transpose(0, 1))
