"""Linear layers: y = x W^T + b, and transformers' Conv1D, y = x W + b."""

import torch
from torch import nn

from opacus_ext.grad_sample.rules import Factors, register_rule


@register_rule(nn.Linear)
def linear(
    layer: nn.Linear, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.Linear``.

    Args:
        activations: ``[B, T, in_features]``
        backprops: ``[B, T, out_features]``
    """
    # Under autocast the layer computed with the cast input.
    factors: Factors = {layer.weight: (backprops, activations.to(backprops.dtype))}
    if layer.bias is not None:
        factors[layer.bias] = (backprops,)
    return factors


@register_rule("transformers.pytorch_utils.Conv1D")
def conv1d_transposed_linear(
    layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of transformers' ``Conv1D`` (GPT-2), a linear layer with a transposed weight.

    Args:
        activations: ``[B, T, in_features]``
        backprops: ``[B, T, out_features]``
    """
    return {
        layer.weight: (activations.to(backprops.dtype), backprops),
        layer.bias: (backprops,),
    }
