"""Convolutions, plain and transposed: a linear map of every window of the input."""

from typing import List

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import Blocks, Lazy, wide
from opacus_ext.grad_sample.rules import Factors, register_rule


def _padding(layer: nn.Module) -> List[int]:
    """As ``F.pad`` takes it: last dim first, both sides."""
    if isinstance(layer.padding, str):
        return list(layer._reversed_padding_repeated_twice)
    return [p for p in reversed(layer.padding) for _ in range(2)]


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, T, channels, *space]`` as rows ``[B, groups * T * prod(space), width]``."""
    x = x.flatten(3).unflatten(2, (groups, -1))
    if groups == 1 and x.shape[1] == 1:
        return x[:, 0, 0].mT  # a view
    return x.permute(0, 2, 1, 4, 3).flatten(1, 3)


class _Conv:
    """
    How a kernel moves over ``large`` ``[B, T, channels, *space]``, with one position
    for every entry of ``small`` ``[B, T, channels, *out]``.
    """

    def __init__(self, layer: nn.Module, small: torch.Tensor, mode: str):
        self.layer, self.mode = layer, mode
        self.rows, self.out = small.shape[1:3], small.shape[3:]

    def padded(self, large: torch.Tensor) -> torch.Tensor:
        """Just what the kernel sees, ``[B * T, channels, *space]``."""
        layer, x = self.layer, large.flatten(0, 1)
        pad = _padding(layer)
        x = F.pad(x, pad) if self.mode == "zeros" else F.pad(x, pad, mode=self.mode)
        steps = zip(self.out, layer.kernel_size, layer.stride, layer.dilation)
        for i, (n, k, s, d) in enumerate(steps):
            x = x.narrow(2 + i, 0, (n - 1) * s + d * (k - 1) + 1)
        return x

    def windows(self, large: torch.Tensor) -> torch.Tensor:
        """
        The entries under every position of the kernel,
        ``[B, groups * T * prod(out), channels / groups * prod(kernel_size)]``.
        """
        layer, x, spatial = self.layer, self.padded(large), len(self.out)
        for i, (k, s, d) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation)
        ):
            x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
        # Now [B * T, channels, *out, *kernel], a view.
        kernel = range(2 + spatial, 2 + 2 * spatial)
        x = x.permute(0, 1, *kernel, *range(2, 2 + spatial)).flatten(1, 1 + spatial)
        return _by_group(x.unflatten(0, (len(large), -1)), layer.groups)

    def summed(self, large: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sum of all rows of ``small`` times their windows: the layer's weight."""
        layer, (length, channels) = self.layer, self.rows
        rows = rows.unflatten(1, (layer.groups, length, -1)).permute(0, 2, 1, 4, 3)
        small = rows.reshape(-1, channels, *self.out)
        return torch.ops.aten.convolution_backward(
            *(small, self.padded(large).to(small), layer.weight.to(small), None),
            *(layer.stride, [0] * len(self.out), layer.dilation),
            *(False, [0] * len(self.out), layer.groups, [False, True, False]),
        )[1]


def _conv(
    layer: nn.Module,
    small: torch.Tensor,
    large: torch.Tensor,
    backprops: torch.Tensor,
    mode: str,
) -> Factors:
    conv, groups = _Conv(layer, small, mode), layer.groups
    length = groups * small.shape[1] * conv.out.numel()
    width = large.shape[2] // groups * layer.weight[0, 0].numel()
    source = large.to(backprops.dtype)
    windows = Lazy(conv.windows, source, length, width, conv.summed)
    rows = _by_group(small.to(backprops.dtype), groups)
    blocks = (Blocks(groups),) if groups > 1 else ()
    factors: Factors = {layer.weight: (*blocks, rows, windows)}
    if layer.bias is not None:
        factors[layer.bias] = (wide(backprops.flatten(3)).sum(3),)
    return factors


@register_rule(nn.Conv1d, event_dims=2)
@register_rule(nn.Conv2d, event_dims=3)
@register_rule(nn.Conv3d, event_dims=4)
def conv(
    layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``, whatever their stride,
    padding, dilation and groups. Weight ``[out, in / groups, *kernel]``.

    Args:
        activations: ``[B, T, in_channels, *space]``
        backprops: ``[B, T, out_channels, *out]``
    """
    return _conv(layer, backprops, activations, backprops, layer.padding_mode)


@register_rule(nn.ConvTranspose1d, event_dims=2)
@register_rule(nn.ConvTranspose2d, event_dims=3)
@register_rule(nn.ConvTranspose3d, event_dims=4)
def conv_transpose(
    layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of the transposed convolutions: the kernel moves over the output, so input
    and gradient change places. Weight ``[in, out / groups, *kernel]``.

    Args:
        activations: ``[B, T, in_channels, *space]``
        backprops: ``[B, T, out_channels, *out]``
    """
    return _conv(layer, activations, backprops, backprops, "zeros")
