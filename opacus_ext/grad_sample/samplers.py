"""Samplers of Opacus for its stock modes: the gradients of a layer, sample by sample.

Opacus asks a sampler for the per-sample gradients of a layer, given its inputs and the
gradient of its output.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn

from opacus_ext.grad_sample.core.clipped_grads import clipped_grads, per_sample_grads

T = torch.Tensor

# Layers of torch for which the stock modes of Opacus take their samplers from here.
LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.PReLU),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def grad_sampler(
    layer: nn.Module, activations: List[T], backprops: T
) -> Dict[nn.Parameter, T]:
    """As Opacus calls it: per-sample gradients ``[B, *shape]``."""
    params = _trained(layer)
    found = per_sample_grads(_loss(layer), params, (activations, backprops))
    return {params[name]: g for name, g in found.grads.items()}


def norm_sampler(
    layer: nn.Module, activations: List[T], backprops: T
) -> Dict[nn.Parameter, T]:
    """As Opacus calls it: norms ``[B]`` of the per-sample gradients."""
    params, seen = _trained(layer), _Norms()
    if params:
        clipped_grads(_loss(layer), params, (activations, backprops), seen)
    norms = torch.cat([backprops.new_zeros(len(params), 0), *seen.found], dim=1)
    return dict(zip(params.values(), norms.to(backprops)))


def _trained(layer: nn.Module) -> Dict[str, nn.Parameter]:
    return {n: p for n, p in layer.named_parameters() if p.requires_grad}


def _loss(layer: nn.Module) -> Any:
    """
    A loss whose gradients are those that the gradient of the output goes on to; without
    the hooks by which Opacus asks.
    """
    return lambda sample: (layer.forward(*sample[0]) * sample[1]).sum()


class _Norms:
    """A clipping function that notes norms, in the order of the samples."""

    per_parameter = True

    def __init__(self) -> None:
        self.found: List[T] = []  # [parameters, samples]

    def __call__(self, norms: T) -> T:
        self.found.append(norms)
        return torch.zeros_like(norms)

    def sensitivity(self, relation: Any = None) -> float:
        """Required of clipping functions."""
        return 1.0
