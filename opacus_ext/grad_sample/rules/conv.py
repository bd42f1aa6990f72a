"""Convolutions: a linear map of every window of the input.

With few windows, the factors are the windows and the backprops, as in a linear layer.
With many, a sample's gradient is smaller than its windows, and torch's own kernel
computes it (:class:`ConvGradients`).
"""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple, Sequence, Union

import torch
from torch.nn import functional as F
from torch.nn import grad

from opacus_ext.grad_sample.factors import Term, dtype_of, upcast, workspace
from opacus_ext.grad_sample.factors.rows import (
    Squares,
    least_of_entries,
    sample_norms,
    square_sum,
    steps,
)
from opacus_ext.grad_sample.rules.registry import Op, register_rule

T = torch.Tensor
Size = Union[int, Sequence[int]]
#: By number of spatial dims: the convolution, and the gradient of its weight.
_FUNCTIONS = {
    1: (F.conv1d, grad.conv1d_weight),
    2: (F.conv2d, grad.conv2d_weight),
    3: (F.conv3d, grad.conv3d_weight),
}


@register_rule(F.conv1d, F.conv2d, F.conv3d)
def conv(
    input: T,
    weight: T,
    bias: T | None = None,
    stride: Size = 1,
    padding: Union[str, Size] = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Op | None:
    """``weight [out, in / groups, *kernel]`` over ``input [*, in, *space]``."""
    dims = weight.dim() - 2
    dilation = _each(dilation, dims)
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    padding = _each(0 if padding == "valid" else padding, dims)
    settings = _each(stride, dims), padding, dilation, groups
    given = OfConv(weight.shape, bias is not None, *settings)
    return Op((weight, bias), (input,), given, dims + 1, (dims + 1,), given.run_all)


def _each(value: Size, dims: int) -> tuple[int, ...]:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * dims if len(value) == 1 else value


class OfConv(NamedTuple):
    """The factors of a weight and bias; settings have one entry a spatial dim."""

    shape: torch.Size  # shape of the weight
    has_bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run_all(self, params: Sequence, x: T) -> T:
        """Runs the layer for all samples."""
        dims = len(self.stride)
        rows = x.shape[: -1 - dims]
        y = _FUNCTIONS[dims][0](x.flatten(0, len(rows) - 1), *params, *self[2:])
        return y.unflatten(0, rows)

    def __call__(self, backprops: T, x: T) -> list[tuple]:
        x, width = x.to(backprops.dtype), self.shape[1:].numel()
        places = backprops.shape[1] * backprops.shape[3:].numel()
        few = places * (self.shape[0] + width) < self.shape.numel()
        factors: tuple = (ConvGradients(self, backprops, x),)
        if few and self.groups == 1:
            windows = self.windows(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            factors = (backprops.flatten(3).mT.flatten(1, 2), windows.flatten(1, 2))
        if not self.has_bias:
            return [factors]
        return [factors, (upcast(backprops.flatten(3)).sum(3),)]

    def windows(self, x: T) -> T:
        """Returns the windows of ``[N, channels, *space]``, one row each."""
        dims = len(self.stride)
        if any(self.padding):  # F.pad copies, even where it adds nothing
            x = F.pad(x, [n for n in reversed(self.padding) for _ in range(2)])
        for i, (k, s, d) in enumerate(zip(self.shape[2:], self.stride, self.dilation)):
            x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
        # Now [N, channels, *out, *kernel], a view.
        return x.movedim(1, 1 + dims).flatten(1, dims).flatten(2)

    def by_sample(self, backprops: T, x: T) -> T:
        """Returns each sample's gradient ``[B, numel]``: its channels are a group."""
        size, shape = len(x), (len(x) * self.shape[0], *self.shape[1:])
        samples = self._replace(shape=torch.Size(shape), groups=self.groups * size)

        def joined(y: T) -> T:  # flat first, as kernels need strides in order
            flat = y.transpose(0, 1).flatten()
            return flat.view(y.shape[1], size * y.shape[2], *y.shape[3:])

        return samples.gradient(joined(backprops), joined(x)).reshape(size, -1)

    def gradient(self, backprops: T, x: T) -> T:
        """Returns the gradient of the weight, summed over ``N`` and all positions."""
        of_weight = _FUNCTIONS[len(self.stride)][1]
        return of_weight(x, self.shape, backprops, *self[2:])


class ConvGradients(Term):
    """
    The gradients of a weight, computed on demand from ``backprops [B, n, out, *space]``
    and ``x [B, n, in, *space]``.
    """

    def __init__(self, conv: OfConv, backprops: T, x: T):
        self.conv, self.backprops, self.x = conv, backprops, x
        self.batch_size, self.device = len(x), x.device
        self.dtype = dtype_of(backprops.dtype)

    def _parts(self) -> Iterator[T]:
        """Yields the gradients of as many samples as fit into the workspace."""
        numel = self.conv.shape.numel()
        step = max(1, workspace() // (numel * self.dtype.itemsize))
        for start, stop in steps(self.batch_size, step):
            some = slice(start, stop)
            yield self.conv.by_sample(self.backprops[some], self.x[some])

    def materialize(self, dtype: torch.dtype, out: T | None = None) -> T:
        first, *others = self._parts()
        new = (torch.cat([first, *others]) if others else first).to(dtype)
        return new if out is None else out.add_(new.view_as(out))

    def squares(self) -> Squares:
        values = torch.cat([square_sum(upcast(g)) for g in self._parts()])
        return Squares(values, least_of_entries(self.size(), self.dtype))

    def size(self) -> T:
        norms = [sample_norms(upcast(x)) for x in (self.backprops, self.x)]
        windows = self.conv.shape[2:].numel()  # the most that an entry is in
        return norms[0] * norms[1] * math.sqrt(windows)

    def wide(self, samples: T) -> Term:
        both = (x[samples.to(x.device)].double() for x in (self.backprops, self.x))
        return ConvGradients(self.conv, *both)

    def weighted_sum(self, weights: T, dtype: torch.dtype, out: T | None = None) -> T:
        weights = weights.to(dtype).view((-1,) + (1,) * (self.x.dim() - 1))
        backprops = (self.backprops.to(dtype) * weights).flatten(0, 1)
        new = self.conv.gradient(backprops, self.x.flatten(0, 1).to(dtype))
        return new if out is None else out.add_(new.view_as(out))

    def without(self, samples: T) -> Term:
        where = samples.view((-1,) + (1,) * (self.x.dim() - 1))
        both = (x.masked_fill(where, 0) for x in (self.backprops, self.x))
        return ConvGradients(self.conv, *both)
