"""RMSNorm, torch's own and, by structure, the many copies of it."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from opacus_ext.grad_sample.independence import keeping
from opacus_ext.grad_sample.rules import Factors, Rule, register_rule


@register_rule(
    nn.RMSNorm, event_dims=lambda layer: len(layer.normalized_shape), by_row=True
)
def rms_norm(
    layer: nn.RMSNorm, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.RMSNorm``.

    Args:
        activations: ``[B, T, *normalized_shape]``
        backprops: ``[B, T, *normalized_shape]``
    """
    normalised = F.rms_norm(activations, layer.normalized_shape, eps=layer.eps)
    return {layer.weight: ((normalised * backprops).flatten(2),)}


def _with_weight(
    layer: nn.Module, weight: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    ((name, _),) = layer.named_parameters()
    with keeping(layer):
        return functional_call(layer, {name: weight}, (x,))


def _slope(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What one entry of the weight is multiplied by: f(x; 1) - f(x; 0)."""
    (weight,) = layer.parameters()
    ones, zeros = torch.ones_like(weight), torch.zeros_like(weight)
    return _with_weight(layer, ones, x) - _with_weight(layer, zeros, x)


@torch.no_grad()
def scale_rule(layer: nn.Module, x: torch.Tensor) -> Optional[Rule]:
    """
    The rule of a layer that only scales what it computed from its input: one
    parameter ``w`` of shape ``[d]``, output ``f(x) * w + g(x)`` along the last dim.
    Every transformers model has an RMSNorm of its own of this form (Gemma's with
    ``1 + w``), as have layer scales. Recognised by structure and checked numerically
    with weights of both signs that the layer does not have, on random inputs of the
    shape of ``x``: ``x`` itself may be zero.

    Args:
        layer: a layer without a registered rule
        x: an input it was called with

    Returns:
        The rule, or None where the layer is something else.
    """
    own = list(layer.parameters())
    if (
        len(own) != 1
        or own[0].dim() != 1
        or any(True for _ in layer.children())
        or any(True for _ in layer.buffers())
        or not x.is_floating_point()
        or x.dim() < 2
        or x.shape[-1] != len(own[0])
    ):
        return None
    weight, generator = own[0], torch.Generator().manual_seed(0)

    def random(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    # Random layers draw here; the user's random state must not notice.
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for scale in (1.0, 0.1, 10.0):
            some = random(x.new_empty([max(n, 1) for n in x.shape]))
            other = scale * random(weight)
            expected = _with_weight(layer, other, some)
            if not isinstance(expected, torch.Tensor) or expected.shape != some.shape:
                return None
            zero = _with_weight(layer, torch.zeros_like(weight), some)
            got = zero + other * _slope(layer, some)
            tolerance = 100 * torch.finfo(got.dtype).eps * float(expected.abs().max())
            if x.dtype == torch.float64:
                tolerance *= 1e6  # many norms compute in float32
            if float((got - expected).abs().max()) > tolerance:
                return None

    def rule(
        layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor
    ) -> Factors:
        with torch.no_grad():
            slope = _slope(layer, activations)
        (weight,) = layer.parameters()
        return {weight: (backprops * slope,)}

    return Rule(rule, lambda layer, output: output.dim() - 1)
