"""Layers of experts of which each process holds its share."""

from __future__ import annotations

from typing import Iterable, List, NamedTuple, Optional, Union

import torch
from torch import nn

from opacus_ext.grad_sample.parallel.dispatch import through_experts
from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.rules.experts import (
    chosen_of,
    has_experts,
    is_experts,
    weighted,
)
from opacus_ext.refused import Refused


class Sharding(NamedTuple):
    """
    On a layer of experts that is sharded, and on its experts' parameters.

    Attributes:
        group: the processes that hold the experts
        count: number of experts in all of them
        names: of all experts, where these are modules
    """

    group: ExpertGroup
    count: int
    names: List[str]


def _stacked(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``forward`` of stacked experts that are sharded; see ``experts_interface``."""
    x = hidden_states.unsqueeze(1).expand(-1, top_k_index.shape[1], -1)
    y = through_experts(x, top_k_index, layer)
    weights = top_k_weights.masked_fill(top_k_index >= layer.sharding.count, 0)
    return weighted(y, weights, hidden_states)


def _modules(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """``forward`` of a ModuleDict that is sharded; see ``switch_experts``."""
    index = chosen_of(selected_experts)
    x = hidden_states.unsqueeze(1).expand(-1, index.shape[1], -1)
    return weighted(through_experts(x, index, layer), routing_weights, hidden_states)


def shard_experts(
    name: str, layer: nn.Module, group: ExpertGroup, check: bool = False
) -> bool:
    """
    Leaves a layer of experts those of this process, in place.

    Args:
        check: only look whether it can be done

    Returns:
        Whether it is such a layer.

    Raises:
        Refused: if the experts can't be shared out evenly; nothing is changed
    """
    stacked = is_experts(layer)
    if not stacked and not has_experts(layer):
        return False
    own = expert_parameters(layer)
    count = len(own[0]) if stacked else len(layer)
    inside = (p for child in layer.children() for p in child.parameters())
    if stacked and any(p.requires_grad for p in inside):
        raise Refused(
            f"{name} ({type(layer).__name__}) has trainable layers that all experts "
            "share, which can't be spread over processes.",
            module=name,
            remedy="Freeze them with requires_grad_(False).",
        )
    if stacked and any(not p.dim() or len(p) != count for p in own):
        raise Refused(
            f"{name} ({type(layer).__name__}) has parameters that are not stacked by "
            "expert.",
            module=name,
            remedy="Move them to another layer.",
        )
    if count % group.size:
        raise Refused(
            f"{name} ({type(layer).__name__}) has {count} experts, which "
            f"{group.size} processes can't share evenly.",
            module=name,
            remedy="Use a number of processes that divides it.",
        )
    if check:
        return True
    each = count // group.size
    names = [] if stacked else list(layer)
    mine = slice(group.rank * each, (group.rank + 1) * each)
    if stacked:
        for key, p in layer._parameters.items():
            if p is not None:
                part = p.detach()[mine].clone()
                setattr(layer, key, nn.Parameter(part, requires_grad=p.requires_grad))
    else:
        for key in set(layer) - set(names[mine]):
            del layer[key]
    sharding = Sharding(group, count, names)
    _mark_parameters(layer, sharding)
    layer.sharding = sharding
    forward = _stacked if stacked else _modules
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return True


def expert_parameters(layer: nn.Module) -> List[nn.Parameter]:
    """The parameters of a layer of experts that belong to one expert each."""
    if is_experts(layer):
        return [p for p in layer._parameters.values() if p is not None]
    as_modules = has_experts(layer) or group_of(layer) is not None
    return list(layer.parameters()) if as_modules else []


def group_of(part: Union[nn.Module, nn.Parameter]) -> Optional[ExpertGroup]:
    """The processes that a layer's experts or a parameter of theirs are spread over."""
    sharding = getattr(part, "sharding", None)
    return sharding.group if isinstance(sharding, Sharding) else None


def find_group(layers: Iterable[nn.Module]) -> Optional[ExpertGroup]:
    """
    The processes that experts among ``layers`` are spread over, if they are. Their
    parameters are marked, as copies of parameters lose such marks.
    """
    found = None
    for layer in layers:
        group = group_of(layer)
        if group is not None:
            found = found or group
            _mark_parameters(layer, layer.sharding)
    return found


def _mark_parameters(layer: nn.Module, sharding: Sharding) -> None:
    for p in expert_parameters(layer):
        p.sharding = sharding
