"""PReLU: a slope for negative inputs, one for all or one a channel."""

import torch
from torch import nn

from opacus_ext.grad_sample.factors import wide
from opacus_ext.grad_sample.rules import Factors, register_rule


@register_rule(
    nn.PReLU, event_dims=lambda layer: None if layer.num_parameters > 1 else 0
)
def prelu(
    layer: nn.PReLU, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.PReLU``.

    Args:
        activations: ``[B, T]`` with one slope, else ``[B, T, channels, *space]``
        backprops: as ``activations``
    """
    slope = backprops * activations.clamp(max=0)
    if layer.num_parameters == 1:
        return {layer.weight: (slope.unsqueeze(2),)}
    return {
        layer.weight: (wide(slope.flatten(3)).sum(3) if slope.dim() > 3 else slope,)
    }
