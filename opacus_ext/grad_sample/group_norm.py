"""GroupNorm and InstanceNorm: scale and shift of each channel's normalised input."""

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.factors import wide
from opacus_ext.grad_sample.rules import Factors, register_rule


def _over_space(x: torch.Tensor) -> torch.Tensor:
    """``[B, T, channels, *space]`` -> ``[B, T, channels]``"""
    return wide(x.flatten(3)).sum(3) if x.dim() > 3 else x


def _by_channel(
    layer: nn.Module, normalised: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Args:
        normalised: the input without scale and shift, ``[B, T, channels, *space]``
        backprops: ``[B, T, channels, *space]``
    """
    factors: Factors = {}
    if layer.weight is not None:
        factors[layer.weight] = (
            _over_space(normalised.view_as(backprops) * backprops),
        )
    if layer.bias is not None:
        factors[layer.bias] = (_over_space(backprops),)
    return factors


@register_rule(nn.GroupNorm, event_dims=None)
def group_norm(
    layer: nn.GroupNorm, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.GroupNorm``.

    Args:
        activations: ``[B, T, channels, *space]``
        backprops: ``[B, T, channels, *space]``
    """
    x = activations.flatten(0, 1)
    return _by_channel(
        layer, F.group_norm(x, layer.num_groups, eps=layer.eps), backprops
    )


@register_rule(nn.InstanceNorm1d, event_dims=2)
@register_rule(nn.InstanceNorm2d, event_dims=3)
@register_rule(nn.InstanceNorm3d, event_dims=4)
def instance_norm(
    layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.InstanceNorm1d``, ``nn.InstanceNorm2d`` and ``nn.InstanceNorm3d``.

    Args:
        activations: ``[B, T, channels, *space]``
        backprops: ``[B, T, channels, *space]``
    """
    normalised = F.instance_norm(
        activations.flatten(0, 1),
        layer.running_mean,
        layer.running_var,
        use_input_stats=layer.training or not layer.track_running_stats,
        momentum=0.0,
        eps=layer.eps,
    )
    return _by_channel(layer, normalised, backprops)
