"""Experts spread over processes, data parallelism around them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import AbstractGradSampleModule, GradSampleHooks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.parallel.sharding import (
    Sharding,
    expert_parameters,
    find_group,
    group_of,
    has_experts,
    is_experts,
    mark,
    run_sharded,
)
from opacus_ext.refused import Refused

__all__ = [
    "expert_parallel",
    "full_state_dict",
]


def expert_parallel(
    module: nn.Module, group: Optional[dist.ProcessGroup] = None
) -> DPDDP:
    """
    Keeps a share of the experts, and all of the rest of a model, in each process.

    Call it in every process, on the same model, before you make the optimizer. Pass the
    result to ``make_private`` like any model under Opacus's data parallelism, in mode
    "ghost" or "ghost_bk". Each process then reads its own samples.
    Clipping is exact, by one all-reduce of as many squared norms as there are samples;
    ``clipping="per_layer"`` clips the share of each process as a layer of its own. All
    samples of a process run at once, or are refused (a branch on data that they answer
    differently, activation checkpointing).

    Every process must take part in every step, with the same number of forward and
    backward passes, also of empty batches. (So with ``BatchMemoryManager`` all
    processes must have the same number of physical batches; choose its size so that no
    batch is split.) If a process dies or is late, the others raise, at the latest after
    the ``timeout`` of ``init_process_group``, before they change a weight in that step.

    Args:
        module: a model with stacked experts (:class:`opacus_ext.layers.Experts` or
            those of transformers 5) or Switch's, the same in all processes; changed in
            place
        group: the processes; None for all. It must be all for ``make_private``

    Returns:
        The model in ``DifferentiallyPrivateDistributedDataParallel``, with the weights
        of process 0.

    Raises:
        Refused: if there are no such experts, their number is not a multiple of the
            number of processes, or they share parameters with other layers; nothing
            is changed
        ProcessFailure: (in training) if another process is lost

    Source:
        DP mixture of experts, "Per-sample gradients with expert parallelism" and
        appendix.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from opacus_ext.layers import TopKFeedForward
        >>> from opacus_ext.distributed import expert_parallel
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = expert_parallel(TopKFeedForward(8, 16, num_experts=4))
        >>> model(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
        >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise Refused(
            "expert_parallel needs the other processes:",
            remedy="call torch.distributed.init_process_group first.",
        )
    processes = ExpertGroup(group)
    layers = _layers_of_experts(module, processes)
    wrapped = DPDDP(module)
    for position, layer in enumerate(layers):
        _shard(layer, position, processes)
    return wrapped


def _layers_of_experts(module: nn.Module, group: ExpertGroup) -> List[nn.Module]:
    """
    The layers whose experts are to be spread.

    Raises:
        Refused: if they can't be spread as they are
    """
    if any(hasattr(m, "autograd_grad_sample_hooks") for m in module.modules()):
        raise Refused(
            "The model has been made private already.",
            remedy="Call opacus_ext.distributed.expert_parallel before make_private.",
        )
    if find_group(module.modules()) is not None:
        raise Refused(
            "The model's experts are spread over processes already.",
            remedy="Call opacus_ext.distributed.expert_parallel once, and use what it "
            "returns.",
        )
    layers: List[nn.Module] = []
    owners: Counter = Counter()
    for layer in module.modules():
        owners.update(p for p in layer._parameters.values() if p is not None)
    for name, layer in module.named_modules():
        if is_experts(layer) or has_experts(layer):
            _check(f"{name} ({type(layer).__name__})", layer, group.size, owners)
            layers.append(layer)
    if not layers:
        raise Refused(
            f"{type(module).__name__} has no experts that can be spread: stacked ones "
            "of opacus_ext.layers or transformers, or a ModuleDict as in Switch.",
            remedy="Use opacus.distributed."
            "DifferentiallyPrivateDistributedDataParallel for a model without.",
        )
    return layers


def _check(name: str, layer: Any, size: int, owners: Counter) -> None:
    params = expert_parameters(layer)
    stacked = is_experts(layer)
    count = len(params[0]) if stacked else len(layer)
    inside = (p for child in layer.children() for p in child.parameters())
    why = remedy = None
    if any(owners[p] > 1 for p in params):
        why = (
            "a parameter of its experts is shared with another layer or expert, which "
            "may come to lie in another process"
        )
        remedy = "Give each a parameter of its own."
    elif stacked and any(p.requires_grad for p in inside):
        why = "its experts share trainable layers, which can't be spread"
        remedy = "Freeze them with requires_grad_(False)."
    elif stacked and any(not p.dim() or len(p) != count for p in params):
        why = "it has parameters that are not stacked by expert"
        remedy = "Move them to another layer."
    elif count % size:
        why = f"it has {count} experts, which {size} processes can't share evenly"
        remedy = "Use a number of processes that divides it."
    if why is not None:
        raise Refused(f"{name}: {why}.", module=name, remedy=remedy)


def _shard(layer: Any, position: int, group: ExpertGroup) -> None:
    """Leaves a layer the experts of this process, in place."""
    stacked = is_experts(layer)
    count = len(expert_parameters(layer)[0]) if stacked else len(layer)
    names = () if stacked else tuple(layer)
    each = count // group.size
    mine = slice(group.rank * each, (group.rank + 1) * each)
    run_sharded(layer)
    if stacked:
        for key, p in layer._parameters.items():
            if p is not None:
                part = p.detach()[mine].clone()
                setattr(layer, key, nn.Parameter(part, requires_grad=p.requires_grad))
    for key in set(names) - set(names[mine]):
        del layer[key]
    mark(layer, Sharding(group, position, count, names))


def full_state_dict(module: nn.Module) -> Dict[str, torch.Tensor]:
    """
    The state dict of the whole model under its original names, as if no expert had
    been spread. To be called in every process.

    Args:
        module: what :func:`expert_parallel` returned, or ``make_private`` made of it

    Returns:
        The state dict, the same in every process.
    """
    while isinstance(module, (AbstractGradSampleModule, GradSampleHooks, DPDDP, DDP)):
        inner: Any = module
        module = inner.module if isinstance(inner, (DPDDP, DDP)) else inner._module
    state = module.state_dict()
    for name, layer in module.named_modules(remove_duplicate=False):
        group = group_of(layer)
        if group is not None:
            prefix = f"{name}." if name else ""
            _gather(state, prefix, layer, group)
    return state


def _gather(state: Dict, prefix: str, layer: Any, group: ExpertGroup) -> None:
    names = layer.sharding.names
    if not names:
        for key, p in layer.named_parameters(recurse=False):
            state[prefix + key] = group.gather(p.detach())
        return
    for i, expert in enumerate(list(layer.values())):
        own = names[group.rank * len(layer) + i]
        for key in expert.state_dict():
            whole = group.gather(state[f"{prefix}{own}.{key}"][None])
            for rank, part in enumerate(whole):
                name = names[rank * len(layer) + i]
                state[f"{prefix}{name}.{key}"] = part.clone()
