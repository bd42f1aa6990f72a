"""Rules: what a layer says about its gradients, once, for every mode.

A rule is given the layer, its input and the gradient of its output, both arranged by
sample, and returns the factors of the gradient of each parameter. It knows nothing of
modes, clipping, batches that are flattened, or parameters that are shared.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from opacus_ext.grad_sample.factors import Factor

Factors = Dict[nn.Parameter, Tuple[Factor, ...]]
RuleFn = Callable[[nn.Module, torch.Tensor, torch.Tensor], Factors]


class Rule(NamedTuple):
    """A registered rule; see :func:`register_rule`."""

    fn: RuleFn
    row_dims: Callable[[nn.Module, torch.Tensor], int]
    refuse: Callable[[nn.Module], Optional[str]] = lambda layer: None
    all_inputs: bool = False


RULES: Dict[Union[type, str], Rule] = {}
# Asked in turn for the rule of a layer that has none in RULES.
FALLBACKS: List[Callable[[nn.Module], Optional[Rule]]] = []


def register_rule(
    *layers: Union[type, str],
    event_dims: Union[int, Callable[[nn.Module], int]] = 1,
    refuse: Callable[[nn.Module], Optional[str]] = lambda layer: None,
    all_inputs: bool = False,
) -> Callable[[RuleFn], RuleFn]:
    """
    Registers the decorated function as the rule of one or more layer types, in every
    mode. Subclasses that keep the layer's ``forward`` are covered too.

    The function is called as ``rule(layer, activations, backprops)`` with

    - ``activations``: the layer's first input, ``[B, T, *event]``
    - ``backprops``: the gradient of the sum of the per-sample losses with respect to
      the layer's output, ``[B, T, *event]``

    and returns for each parameter one factor an axis, left to right: dense rows
    ``[B, T', width]`` or a :class:`~opacus_ext.grad_sample.factors.OneHot`.

    Args:
        layers: types, or names ("package.module.Class") of types whose package is
            not imported for their sake
        event_dims: how many trailing dims of the output belong to one row; all dims
            before them only say which row it is
        refuse: returns the reason why a layer, as configured, can't be handled
        all_inputs: pass as ``activations`` a dict of all tensor arguments by name;
            those without the output's rows come as they are

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus_ext import register_rule
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return self.weight * x
        >>> @register_rule(Scale)
        ... def scale(layer, activations, backprops):
        ...     return {layer.weight: (backprops * activations,)}
    """

    def row_dims(layer: nn.Module, output: torch.Tensor) -> int:
        event = event_dims(layer) if callable(event_dims) else event_dims
        return output.dim() - event

    def decorator(fn: RuleFn) -> RuleFn:
        for layer in layers:
            RULES[layer] = Rule(fn, row_dims, refuse, all_inputs)
        return fn

    return decorator


def own_parameters(layer: nn.Module) -> Dict[str, nn.Parameter]:
    """The trainable parameters that belong to ``layer`` itself, by name."""
    own = layer._parameters.items()
    return {n: p for n, p in own if p is not None and p.requires_grad}


def find_rule(layer: nn.Module) -> Optional[Rule]:
    """
    The rule of a layer, or None. A subclass whose ``forward`` differs from that of
    the type with the rule, in its class or on the instance, has none.
    """
    if "forward" in vars(layer):
        return None
    for cls in type(layer).__mro__:
        rule = RULES.get(cls) or RULES.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is not None:
            return rule if type(layer).forward is cls.forward else None
    return next(filter(None, (find(layer) for find in FALLBACKS)), None)
