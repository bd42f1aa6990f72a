"""LayerNorm: scale and shift of the normalised input."""

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.rules import Factors, register_rule


@register_rule(
    nn.LayerNorm, event_dims=lambda layer: len(layer.normalized_shape), by_row=True
)
def layer_norm(
    layer: nn.LayerNorm, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.LayerNorm``.

    Args:
        activations: ``[B, T, *normalized_shape]``
        backprops: ``[B, T, *normalized_shape]``
    """
    factors: Factors = {}
    if layer.weight is not None:
        normalised = F.layer_norm(activations, layer.normalized_shape, eps=layer.eps)
        factors[layer.weight] = ((normalised * backprops).flatten(2),)
    if layer.bias is not None:
        factors[layer.bias] = (backprops.flatten(2),)
    return factors
