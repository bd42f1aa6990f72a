"""Grad samplers and norm samplers for the stock modes of Opacus, by the core."""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from torch import nn

from opacus_ext.grad_sample.core.clipped_grads import clipped_grads, per_sample_grads
from opacus_ext.refused import warn_once

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
    gradients = per_sample_grads(loss, params, (activations, backprops)).grads
    return {params[name]: gradient for name, gradient in gradients.items()}


def norm_sampler(
    layer: nn.Module, activations: list[T], backprops: T
) -> dict[nn.Parameter, T]:
    """Gives the norms ``[B]`` of the per-sample gradients, as Opacus asks."""
    loss, params = _loss_of(layer)
    recorder = _Norms()
    if params:
        clipped_grads(loss, params, (activations, backprops), recorder)
    # An empty batch has no norms to record.
    empty = backprops.new_zeros(len(params), 0)
    norms = torch.cat([empty, *recorder.norms], dim=1)
    return dict(zip(params.values(), norms.to(backprops)))


def tell_of_others(engine: Any, module: nn.Module, mode: str) -> None:
    """
    Warns once that samplers which users have registered are not used in a mode of this
    package, naming their layers. Mode "functorch" has never used any.
    """
    if mode == "functorch":
        return
    tables = [GradSampleHooks.GRAD_SAMPLERS]
    # Only the ghost modes look for norm samplers.
    if mode != "hooks":
        tables.append(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
    layers = []
    for name, layer in module.named_modules():
        samplers = [table.get(type(layer)) for table in tables]
        parameters = layer.parameters(recurse=False)
        trained = any(parameter.requires_grad for parameter in parameters)
        if trained and any(map(_is_of_user, samplers)):
            layers.append(describe(name, layer))
    if not layers:
        return
    few = ", ".join(layers[:3])
    if layers[3:]:
        few += f" and {len(layers) - 3} more"
    warn_once(
        engine,
        "samplers",
        f"A sampler was registered with Opacus for {few}. It is not used: "
        f"grad_sample_mode={mode!r} computes exact per-sample gradients of every layer "
        "by itself, from the layer's own forward. Where a sampler gives something else "
        "on purpose, use opacus.grad_sample.GradSampleModule.",
    )


def _is_of_user(sampler: Any) -> bool:
    """Returns True for a sampler that is neither Opacus's nor of this package."""
    made_in = str(getattr(sampler, "__module__", "")).partition(".")[0]
    return sampler is not None and made_in not in ("opacus", "opacus_ext")


def _loss_of(layer: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The output times its gradient, past Opacus's hooks; and the parameters."""
    params = trained_parameters(layer)

    def loss(sample: Any) -> T:
        activations, backprop = sample
        # The call of the layer would run Opacus's hooks again.
        return (layer.forward(*activations) * backprop).sum()

    return loss, params


def trained_parameters(layer: nn.Module) -> dict[str, Any]:
    """Returns the trainable parameters of a layer, with those of its children."""
    return {
        name: parameter
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    }


def describe(name: str, layer: nn.Module) -> str:
    """Returns the name and class of a layer, for errors."""
    return f"{name or 'the model'} ({type(layer).__name__})"


class _Norms:
    """A clipping function that only records norms ``[parameters, B]``."""

    per_parameter = True

    def __init__(self) -> None:
        self.norms: list[T] = []

    def __call__(self, norms: T) -> T:
        self.norms.append(norms)
        # Opacus asks for no sum here.
        return torch.zeros_like(norms)

    def sensitivity(self, relation: Any = None) -> float:
        """Required of clipping functions."""
        return 1.0
