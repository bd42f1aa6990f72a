"""Bilinear layers: y[o] = x1^T W[o] x2 + b[o]."""

from typing import Dict

import torch
from torch import nn

from opacus_ext.grad_sample.rules import Factors, register_rule


@register_rule(nn.Bilinear, all_inputs=True)
def bilinear(
    layer: nn.Bilinear, activations: Dict[str, torch.Tensor], backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.Bilinear``: three factors, one an axis of the weight.

    Args:
        activations: "input1" ``[B, T, in1_features]`` and "input2", as wide as in2
        backprops: ``[B, T, out_features]``
    """
    first, second = (activations[n].to(backprops.dtype) for n in ("input1", "input2"))
    factors: Factors = {layer.weight: (backprops, first, second)}
    if layer.bias is not None:
        factors[layer.bias] = (backprops,)
    return factors
