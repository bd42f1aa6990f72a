"""Convolutions, plain and transposed: a linear map of every window of the input."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
import torch.nn.functional as F

from opacus_ext.grad_sample.factors import Blocks, Factor, Lazy, wide
from opacus_ext.grad_sample.rules.registry import Op, is_shared, register_op


class _Settings(NamedTuple):
    """How a kernel moves, one entry a dim of space."""

    weight: torch.Tensor
    kernel_size: Tuple[int, ...]
    stride: Tuple[int, ...]
    padding: List[int]  # as ``F.pad`` takes it: last dim first, both sides
    dilation: Tuple[int, ...]
    groups: int


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

    def __init__(self, layer: _Settings, small: torch.Tensor):
        self.layer = layer
        self.rows, self.out = small.shape[1:3], small.shape[3:]

    def padded(self, large: torch.Tensor) -> torch.Tensor:
        """Just what the kernel sees, ``[B * T, channels, *space]``."""
        layer, x = self.layer, large.flatten(0, 1)
        x = F.pad(x, layer.padding)
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
        return _by_group(x.unflatten(0, (large.shape[0], -1)), layer.groups)

    def summed(self, large: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sum of all rows of ``small`` times their windows: the layer's weight."""
        layer, (length, channels) = self.layer, self.rows
        rows = rows.unflatten(1, (layer.groups, length, -1)).permute(0, 2, 1, 4, 3)
        small = rows.reshape(-1, channels, *self.out)
        return torch.ops.aten.convolution_backward(
            small,
            self.padded(large).to(small),
            layer.weight.to(small),
            None,  # sizes of the bias
            layer.stride,
            [0] * len(self.out),  # padding, done above
            layer.dilation,
            False,  # transposed
            [0] * len(self.out),  # output padding
            layer.groups,
            [False, True, False],  # the weight's gradient alone
        )[1]


def _factors(
    layer: _Settings,
    small: torch.Tensor,
    large: torch.Tensor,
    backprops: torch.Tensor,
) -> List[Tuple[Factor, ...]]:
    conv, groups = _Conv(layer, small), layer.groups
    length = groups * small.shape[1] * conv.out.numel()
    width = large.shape[2] // groups * layer.weight[0, 0].numel()
    source = large.to(backprops.dtype)
    windows = Lazy(conv.windows, source, length, width, conv.summed)
    rows = _by_group(small.to(backprops.dtype), groups)
    blocks = (Blocks(groups),) if groups > 1 else ()
    return [(*blocks, rows, windows), (wide(backprops.flatten(3)).sum(3),)]


Size = Union[int, Sequence[int]]


def _each(value: Size, dims: int) -> Tuple[int, ...]:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * dims if len(value) == 1 else value


def _settings(
    weight: torch.Tensor,
    stride: Size,
    padding: Union[str, Size],
    dilation: Size,
    groups: int,
) -> _Settings:
    dims = weight.dim() - 2
    kernel, dilation = tuple(weight.shape[2:]), _each(dilation, dims)
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = [(n // 2, n - n // 2) for n in whole]
    else:
        sides = [(n, n) for n in _each(0 if padding == "valid" else padding, dims)]
    pad = [n for side in reversed(sides) for n in side]
    shared = weight.detach()
    return _Settings(shared, kernel, _each(stride, dims), pad, dilation, groups)


_PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _whole(kinds: Dict[int, Callable], settings: Tuple[Any, ...]) -> Callable:
    """A convolution of all samples at once."""

    def whole(params: Sequence, x: torch.Tensor) -> torch.Tensor:
        spatial = params[0].dim() - 2
        rows = x.shape[: -1 - spatial]
        y = kinds[spatial](x.flatten(0, len(rows) - 1), *params, *settings)
        return y.unflatten(0, rows)

    return whole


@register_op(F.conv1d, F.conv2d, F.conv3d)
def conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    stride: Size = 1,
    padding: Union[str, Size] = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Optional[Op]:
    """``weight [out, in / groups, *kernel]`` over ``input [*, in, *space]``."""
    if not is_shared(weight) or (bias is not None and not is_shared(bias)):
        return None
    layer = _settings(weight, stride, padding, dilation, groups)

    def factors(backprops: torch.Tensor, x: torch.Tensor) -> List[Tuple[Factor, ...]]:
        return _factors(layer, backprops, x, backprops)

    event = weight.dim() - 1
    whole = _whole(_PLAIN, (stride, padding, dilation, groups))
    return Op((weight, bias), (input,), factors, event, (event,), whole)


@register_op(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Optional[Op]:
    """
    ``weight [in, out / groups, *kernel]``: the kernel moves over the output, so input
    and gradient change places.
    """
    if not is_shared(weight) or (bias is not None and not is_shared(bias)):
        return None
    layer = _settings(weight, stride, padding, dilation, groups)

    def factors(backprops: torch.Tensor, x: torch.Tensor) -> List[Tuple[Factor, ...]]:
        return _factors(layer, x, backprops, backprops)

    event = weight.dim() - 1
    settings = (stride, padding, output_padding, groups, dilation)
    whole = _whole(_TRANSPOSED, settings)
    return Op((weight, bias), (input,), factors, event, (event,), whole)
