"""Grad samplers and norm samplers for the stock modes of Opacus, by the core."""

from __future__ import annotations

from typing import Any

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
    layer: nn.Module, activations: list[T], backprops: T
) -> dict[nn.Parameter, T]:
    """Gives the per-sample gradients ``[B, *shape]`` of a layer, as Opacus asks."""
    loss, params = _loss_of(layer)
    found = per_sample_grads(loss, params, (activations, backprops))
    return {params[name]: g for name, g in found.grads.items()}


def norm_sampler(
    layer: nn.Module, activations: list[T], backprops: T
) -> dict[nn.Parameter, T]:
    """Gives the norms ``[B]`` of the per-sample gradients, as Opacus asks."""
    (loss, params), seen = _loss_of(layer), _Norms()
    if params:
        clipped_grads(loss, params, (activations, backprops), seen)
    norms = torch.cat([backprops.new_zeros(len(params), 0), *seen.found], dim=1)
    return dict(zip(params.values(), norms.to(backprops)))


def _loss_of(layer: nn.Module) -> tuple[Any, dict[str, nn.Parameter]]:
    """The output times its gradient, past Opacus's hooks; and the parameters."""
    params = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    return lambda sample: (layer.forward(*sample[0]) * sample[1]).sum(), params


class _Norms:
    """A clipping function that only records norms ``[parameters, B]``."""

    per_parameter = True

    def __init__(self) -> None:
        self.found: list[T] = []

    def __call__(self, norms: T) -> T:
        self.found.append(norms)
        return torch.zeros_like(norms)

    def sensitivity(self, relation: Any = None) -> float:
        """Required of clipping functions."""
        return 1.0
