"""Layers of experts of which each process holds its share."""

from __future__ import annotations

import inspect
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample.parallel.dispatch import through_experts
from opacus_ext.grad_sample.parallel.group import ExpertGroup

T = torch.Tensor

# What the decorator use_experts_implementation of transformers 5 leaves on a class.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_SWITCH = ["hidden_states", "selected_experts", "routing_weights"]


class Sharding(NamedTuple):
    """
    On a layer of experts that is sharded, and on its experts' parameters.

    Attributes:
        group: the processes that hold the experts
        place: of the layer in the model
        experts: how many there are in all processes
        names: of all experts, where these are modules
    """

    group: ExpertGroup
    place: int
    experts: int
    names: Tuple[str, ...]


def is_experts(layer: nn.Module) -> bool:
    """
    Whether a layer follows the experts interface of transformers 5, as
    :class:`opacus_ext.layers.Experts` does: weights are stacked by expert.
    """
    return all(hasattr(layer, mark) for mark in _MARKS)


def has_experts(layer: nn.Module) -> bool:
    """Whether it is a ModuleDict that sends tokens to its entries, as Switch has it."""
    takes = list(inspect.signature(type(layer).forward).parameters)[1:]
    return isinstance(layer, nn.ModuleDict) and takes == _SWITCH


def expert_parameters(layer: nn.Module) -> List[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return [p for p in layer._parameters.values() if p is not None]
    as_modules = has_experts(layer) or group_of(layer) is not None
    return list(layer.parameters()) if as_modules else []


def _stacked(layer: Any, hidden_states: T, top_k_index: T, top_k_weights: T) -> T:
    """``forward`` of stacked experts that are sharded; see ``experts_interface``."""
    weights = top_k_weights.masked_fill(top_k_index >= layer.sharding.experts, 0)
    rows = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1)
    y = through_experts(rows.flatten(0, 1), top_k_index.flatten(), layer)
    y = y.view(rows.shape) * weights.unsqueeze(-1)
    return y.sum(1).to(hidden_states.dtype)


def _modules(
    layer: Any, hidden_states: T, selected_experts: T, routing_weights: T
) -> T:
    """``forward`` of a ModuleDict that is sharded; experts are one-hot rows."""
    none = 1 - selected_experts.sum(-1, keepdim=True).clamp(max=1)
    index = torch.cat([selected_experts, none], dim=-1).argmax(-1)
    return _stacked(layer, hidden_states, index, routing_weights)


def mark(layer: Any, sharding: Sharding) -> None:
    """Notes that a layer is sharded, there and on its experts' parameters."""
    layer.sharding = sharding
    for p in expert_parameters(layer):
        setattr(p, "sharding", sharding)


def run_sharded(layer: nn.Module) -> None:
    """Puts a forward in the place of the layer's that sends tokens to their experts."""
    forward = _stacked if is_experts(layer) else _modules
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def group_of(part: Any) -> Optional[ExpertGroup]:
    """The processes that a layer's experts or a parameter of theirs are spread over."""
    sharding = getattr(part, "sharding", None)
    return sharding.group if isinstance(sharding, Sharding) else None


def find_group(layers: Iterable[nn.Module]) -> Optional[ExpertGroup]:
    """
    The processes that experts among ``layers`` are spread over, if they are. Their
    parameters are marked, as copies of parameters lose such marks.
    """
    sharded: List[Any] = [x for x in layers if group_of(x) is not None]
    for layer in sharded:
        mark(layer, layer.sharding)
    return group_of(sharded[0]) if sharded else None
