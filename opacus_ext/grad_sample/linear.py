"""Linear layers: y = x W^T + b, and transformers' Conv1D, y = x W + b."""

import functools
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.rules import Factors, Record, register_rule


def linear_factors(
    weight: nn.Parameter,
    bias: Optional[nn.Parameter],
    activations: torch.Tensor,
    backprops: torch.Tensor,
) -> Factors:
    """
    Factors of ``F.linear(activations, weight, bias)``.

    Args:
        activations: ``[B, T, in_features]``
        backprops: ``[B, T, out_features]``
    """
    # Under autocast the layer computed with the cast input.
    factors: Factors = {weight: (backprops, activations.to(backprops.dtype))}
    if bias is not None:
        factors[bias] = (backprops,)
    return factors


def record_linear(
    record: Record,
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: Optional[nn.Parameter] = None,
) -> torch.Tensor:
    """``F.linear`` inside a stand-in: ``[*rows, in]`` -> ``[*rows, out]``."""
    factors = functools.partial(linear_factors, weight, bias)
    return record(F.linear(x, weight, bias), x, (weight, bias), factors)


@register_rule(nn.Linear, by_row=True)
def linear(
    layer: nn.Linear, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.Linear``.

    Args:
        activations: ``[B, T, in_features]``
        backprops: ``[B, T, out_features]``
    """
    return linear_factors(layer.weight, layer.bias, activations, backprops)


@register_rule("transformers.pytorch_utils.Conv1D", by_row=True)
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
