"""Convolutions: a linear map of every window of the input.

With few windows, the factors are the windows and the backprops, as in a linear layer.
With many, a sample's gradient is smaller than its windows, and torch's own kernel
computes it (:class:`ConvGradients`).
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, NamedTuple, Sequence, Union

import torch
from torch.nn import functional as F
from torch.nn import grad

from opacus_ext.grad_sample.factors import Term, dtype_of, upcast, workspace
from opacus_ext.grad_sample.factors.grad_sample import add_into
from opacus_ext.grad_sample.factors.rows import (
    Scale,
    Squares,
    inverse_of,
    least_of_entries,
    sample_norms,
    square_sum,
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
    kernel = weight.shape[2:]
    dims = len(kernel)
    dilation = _of_each_dim(dilation, dims)
    if padding == "same":
        spans = [step * (size - 1) for step, size in zip(dilation, kernel)]
        # torch pads an odd span by one more on one side, which no setting can say.
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    elif padding == "valid":
        padding = 0
    layer = OfConv(
        weight.shape,
        bias is not None,
        _of_each_dim(stride, dims),
        _of_each_dim(padding, dims),
        dilation,
        groups,
    )
    return Op(
        params=(weight, bias),
        data=(input,),
        factors=layer,
        event_dims=dims + 1,
        data_dims=(dims + 1,),
        run_all=layer.run_all,
    )


def _of_each_dim(value: Size, dims: int) -> tuple[int, ...]:
    """Returns a setting with one entry a spatial dim."""
    if isinstance(value, int):
        return (value,) * dims
    if len(value) == 1:
        return tuple(value) * dims
    return tuple(value)


class OfConv(NamedTuple):
    """
    The factors of a weight and bias. The settings after these have one entry a spatial
    dim, but for ``groups``; torch's functions take them in the same order.

    Attributes:
        shape: shape of the weight
        has_bias: True if the layer has a bias
    """

    shape: torch.Size
    has_bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run_all(self, params: Sequence, inputs: T) -> T:
        """Runs the layer for all samples."""
        dims = len(self.stride)
        rows = inputs.shape[: -1 - dims]
        function = _FUNCTIONS[dims][0]
        flat = inputs.flatten(0, len(rows) - 1)
        outputs = function(flat, *params, *self[2:])
        return outputs.unflatten(0, rows)

    def __call__(self, backprops: T, inputs: T) -> list[tuple]:
        inputs = inputs.to(backprops.dtype)
        # Windows ``[windows, width]`` are worth their memory where they are few.
        channels = self.shape[0]
        width = self.shape[1:].numel()
        count = backprops.shape[1] * backprops.shape[3:].numel()
        is_small = count * (channels + width) < self.shape.numel()
        factors: tuple = (ConvGradients(self, backprops, inputs),)
        if is_small and self.groups == 1:
            windows = self.windows(inputs.flatten(0, 1))
            windows = windows.unflatten(0, inputs.shape[:2])
            rows = backprops.flatten(3).mT
            factors = (rows.flatten(1, 2), windows.flatten(1, 2))
        if not self.has_bias:
            return [factors, ()]
        dtype = dtype_of(backprops.dtype)
        of_bias = (backprops.flatten(3).sum(3, dtype=dtype),)
        return [factors, of_bias]

    def windows(self, inputs: T) -> T:
        """Returns the windows of ``[N, channels, *space]``, one row each."""
        dims = len(self.stride)
        if any(self.padding):
            # F.pad copies, even where it adds nothing. It begins with the last dim.
            margins = []
            for margin in reversed(self.padding):
                margins += [margin, margin]
            inputs = F.pad(inputs, margins)
        windows = inputs
        sizes = zip(self.shape[2:], self.stride, self.dilation)
        for dim, (size, stride, dilation) in enumerate(sizes, start=2):
            span = dilation * (size - 1) + 1
            windows = windows.unfold(dim, span, stride)[..., ::dilation]
        # The windows are a view ``[N, channels, *out, *kernel]`` so far.
        windows = windows.movedim(1, 1 + dims)
        return windows.flatten(1, dims).flatten(2)

    def by_sample(self, backprops: T, inputs: T) -> T:
        """Returns each sample's gradient ``[B, numel]``: its channels are a group."""
        size = len(inputs)
        channels, *others = self.shape
        shape = torch.Size([size * channels, *others])
        layer = self._replace(shape=shape, groups=self.groups * size)
        gradients = layer.gradient(_as_channels(backprops), _as_channels(inputs))
        return gradients.reshape(size, -1)

    def gradient(self, backprops: T, inputs: T) -> T:
        """Returns the gradient of the weight, summed over ``N`` and all positions."""
        function: Callable = _FUNCTIONS[len(self.stride)][1]
        return function(inputs, self.shape, backprops, *self[2:])


def _as_channels(tensor: T) -> T:
    """Returns ``[B, N, channels, *space]`` as ``[N, B * channels, *space]``."""
    size, rows, channels, *space = tensor.shape
    # The copy is flat first, as kernels need strides in the order of dims.
    flat = tensor.transpose(0, 1).flatten()
    return flat.view(rows, size * channels, *space)


class ConvGradients(Term):
    """
    The gradients of a weight, computed on demand from ``backprops [B, n, out, *space]``
    and ``inputs [B, n, in, *space]``.
    """

    def __init__(
        self,
        layer: OfConv,
        backprops: T,
        inputs: T,
        inverse: T | None = None,
    ):
        self.layer = layer
        self.inverse = inverse  # of the scale [numel], which multiplies the gradients
        self.backprops, self.inputs = backprops, inputs
        self.batch_size = len(inputs)
        self.device = inputs.device
        self.dtype = dtype_of(backprops.dtype)
        # The shape of numbers ``[B]`` that are broadcast to backprops and inputs.
        self._column = (-1,) + (1,) * (inputs.dim() - 1)

    def _parts(self) -> Iterator[T]:
        """Yields the gradients of as many samples as fit into the workspace."""
        sample_bytes = self.layer.shape.numel() * self.dtype.itemsize
        step = max(1, workspace() // sample_bytes)
        for start in range(0, self.batch_size, step):
            samples = slice(start, start + step)
            backprops, inputs = self.backprops[samples], self.inputs[samples]
            gradients = self.layer.by_sample(backprops, inputs)
            if self.inverse is not None:
                gradients = gradients * self.inverse
            yield gradients

    def _with_each(self, change: Callable[[T], T]) -> Term:
        """Returns the gradients of changed backprops and inputs."""
        backprops, inputs = change(self.backprops), change(self.inputs)
        return ConvGradients(self.layer, backprops, inputs, self.inverse)

    def tensors(self) -> Sequence[T]:
        return self.backprops, self.inputs

    def materialize(self, dtype: torch.dtype, total: T | None = None) -> T:
        gradients, *others = self._parts()
        if others:
            gradients = torch.cat([gradients, *others])
        return add_into(total, gradients.to(dtype))

    def squares(self) -> Squares:
        values = [square_sum(upcast(gradients)) for gradients in self._parts()]
        least = least_of_entries(self.size(), self.dtype)
        return Squares(torch.cat(values), least)

    def size(self) -> T:
        backprops = sample_norms(self.backprops, self.dtype)
        inputs = sample_norms(self.inputs, self.dtype)
        # An entry of the input is in at most so many windows.
        windows = self.layer.shape[2:].numel()
        size = backprops * inputs * math.sqrt(windows)
        if self.inverse is not None:
            size = size * self.inverse.max()
        return size

    def wide(self, samples: T) -> Term:
        def selected(tensor: T) -> T:
            return tensor[samples.to(tensor.device)].double()

        return self._with_each(selected)

    def weighted_sum(
        self,
        weights: T,
        dtype: torch.dtype,
        total: T | None = None,
    ) -> T:
        weights = weights.to(dtype).view(self._column)
        backprops = self.backprops.to(dtype) * weights
        inputs = self.inputs.flatten(0, 1).to(dtype)
        gradient = self.layer.gradient(backprops.flatten(0, 1), inputs)
        if self.inverse is not None:
            gradient = gradient * self.inverse.view(gradient.shape)
        return add_into(total, gradient)

    def divided(self, scale: Scale) -> Term:
        inverse = inverse_of(scale)
        return ConvGradients(self.layer, self.backprops, self.inputs, inverse)

    def without(self, samples: T) -> Term:
        mask = samples.view(self._column)
        return self._with_each(lambda rows: rows.masked_fill(mask, 0))
