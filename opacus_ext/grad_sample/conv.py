"""Convolutions, plain and transposed: a linear map of every window of the input."""

import functools
from typing import List, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import Blocks, Lazy
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


def _windows(
    layer: nn.Module, out: Sequence[int], pad: List[int], mode: str, x: torch.Tensor
) -> torch.Tensor:
    """
    The entries of the input under every position of the kernel.

    Args:
        out: how many positions there are in each dim
        x: ``[B, T, channels, *space]``

    Returns:
        ``[B, groups * T * prod(out), channels / groups * prod(kernel_size)]``
    """
    batch_size, spatial = x.shape[0], len(out)
    x = x.flatten(0, 1)
    x = F.pad(x, pad) if mode == "zeros" else F.pad(x, pad, mode=mode)
    for i, (n, k, s, d) in enumerate(
        zip(out, layer.kernel_size, layer.stride, layer.dilation)
    ):
        x = x.unfold(2 + i, d * (k - 1) + 1, s).narrow(2 + i, 0, n)[..., ::d]
    # Now [B * T, channels, *out, *kernel], a view.
    kernel = range(2 + spatial, 2 + 2 * spatial)
    x = x.permute(0, 1, *kernel, *range(2, 2 + spatial)).flatten(1, 1 + spatial)
    return _by_group(x.unflatten(0, (batch_size, -1)), layer.groups)


def _conv(
    layer: nn.Module,
    small: torch.Tensor,
    large: torch.Tensor,
    backprops: torch.Tensor,
    mode: str,
) -> Factors:
    """
    Args:
        small: has an entry for every position of the kernel, ``[B, T, channels, *out]``
        large: what the kernel moves over, ``[B, T, channels, *space]``
    """
    out, groups = small.shape[3:], layer.groups
    length = groups * small.shape[1] * out.numel()
    width = large.shape[2] // groups * layer.weight[0, 0].numel()
    make = functools.partial(_windows, layer, out, _padding(layer), mode)
    windows = Lazy(make, large.to(backprops.dtype), length, width)
    rows = _by_group(small.to(backprops.dtype), groups)
    blocks = (Blocks(groups),) if groups > 1 else ()
    factors: Factors = {layer.weight: (*blocks, rows, windows)}
    if layer.bias is not None:
        factors[layer.bias] = (backprops.flatten(3).sum(3),)
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
