"""Samplers of Opacus made of our rules, and rules made of a user's samplers."""

from __future__ import annotations

from typing import Dict, List, Optional

import torch
from opacus.grad_sample import GradSampleHooks
from torch import nn

from opacus_ext.grad_sample.modes.common import layer_gradients
from opacus_ext.grad_sample.rules.registry import Factors, Rule

# Layers of torch for which the stock modes of Opacus take their samplers from here.
LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.PReLU,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def grad_sampler(
    layer: nn.Module, activations: List[torch.Tensor], backprops: torch.Tensor
) -> Dict[nn.Parameter, torch.Tensor]:
    """As Opacus calls it: per-sample gradients ``[B, *shape]``, by a run of samples."""
    found = layer_gradients(layer, activations, backprops)
    return {p: s.materialise() for p, s in found.items()}


def norm_sampler(
    layer: nn.Module, activations: List[torch.Tensor], backprops: torch.Tensor
) -> Dict[nn.Parameter, torch.Tensor]:
    """As Opacus calls it: norms ``[B]`` of the per-sample gradients."""
    found = layer_gradients(layer, activations, backprops)
    return {p: s.squared_norm().sqrt() for p, s in found.items()}


def rule_of_sampler(layer: nn.Module) -> Optional[Rule]:
    """A rule from a grad sampler that a user has registered with Opacus, or None."""
    sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(layer))
    if sampler in (None, grad_sampler) or type(layer).__module__.startswith(
        "torch.nn."
    ):
        return None

    # A sampler takes what a batch-first layer would see: [B, d] or [B, T, ...].
    def natural(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(1) if x.dim() == 3 and x.shape[1] == 1 else x

    def rule(
        layer: nn.Module, activations: Dict[str, torch.Tensor], backprops: torch.Tensor
    ) -> Factors:
        inputs = [natural(x) for x in activations.values()]
        found = sampler(layer, inputs, natural(backprops))
        return {p: (g.reshape(len(g), 1, p.numel()),) for p, g in found.items()}

    def row_dims(layer: nn.Module, output: torch.Tensor) -> int:
        return min(2, output.dim() - 1)

    return Rule(rule, row_dims, all_inputs=True)
