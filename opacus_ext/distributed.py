"""Experts spread over processes, data parallelism around them."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Optional

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import AbstractGradSampleModule, GradSampleHooks
from torch import nn

from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.parallel.sharding import (
    expert_parameters,
    find_group,
    group_of,
    shard_experts,
)
from opacus_ext.refused import Refused


def expert_parallel(
    module: nn.Module, group: Optional[dist.ProcessGroup] = None
) -> DPDDP:
    """
    Leaves each process its share of the experts, and all of the rest of a model.

    To be called in every process, on the same model, before the optimizer is made. What
    it returns goes to ``make_private`` like any model under Opacus's data parallelism;
    each process then reads its own samples. Clipping is exact: flat clipping takes one
    all-reduce of as many squared norms as there are samples. ``clipping="per_layer"``
    takes none, and clips the share of each process as a layer of its own.

    Every process must take part in every step: the same number of forward and backward
    passes, of empty batches too (so with ``BatchMemoryManager`` the physical batches
    must come out equal in number; choose its size so that none is split). A process
    that dies or is late makes the others raise, at the latest after the ``timeout`` of
    ``init_process_group``, before they change a weight in that step.

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
    _refuse(module)
    processes = ExpertGroup(group)
    modules = list(module.named_modules())
    for check in (True, False):
        found = [shard_experts(name, m, processes, check) for name, m in modules]
        if not any(found):
            raise Refused(
                f"{type(module).__name__} has no experts that can be spread: stacked "
                "ones of opacus_ext.layers or transformers, or a ModuleDict as in "
                "Switch.",
                remedy=(
                    "Use DifferentiallyPrivateDistributedDataParallel for a model "
                    "without."
                ),
            )
        if check:
            module = DPDDP(module)
    return module


def _refuse(module: nn.Module) -> None:
    """
    Raises:
        Refused: if experts can't be spread as they are; nothing is changed
    """
    if any(hasattr(m, "autograd_grad_sample_hooks") for m in module.modules()):
        raise Refused(
            "The model has been made private already.",
            remedy="Call expert_parallel before make_private.",
        )
    if find_group(module.modules()) is not None:
        raise Refused(
            "The model's experts are spread over processes already.",
            remedy="Call expert_parallel once, and use what it returns.",
        )
    owners: Counter = Counter()
    for layer in module.modules():
        owners.update(p for p in layer._parameters.values() if p is not None)
    for name, layer in module.named_modules():
        own = expert_parameters(layer)
        if any(owners[p] > 1 for p in own):
            raise Refused(
                f"{name} ({type(layer).__name__}): a parameter of its experts is "
                "shared with another layer or expert, which may come to lie in "
                "another process.",
                remedy="Give each a parameter of its own.",
            )


def full_state_dict(module: nn.Module) -> Dict[str, torch.Tensor]:
    """
    The state dict of the whole model under its original names, as if no expert had
    been spread. To be called in every process.

    Args:
        module: what :func:`expert_parallel` returned, or ``make_private`` made of it

    Returns:
        The state dict, the same in every process.
    """
    while isinstance(module, (AbstractGradSampleModule, GradSampleHooks, DPDDP)):
        module = module.module if isinstance(module, DPDDP) else module._module
    state = module.state_dict()
    for name, layer in module.named_modules(remove_duplicate=False):
        group = group_of(layer)
        if group is not None:
            prefix = f"{name}." if name else ""
            _gather(state, prefix, layer, group)
    return state


def _gather(state: Dict, prefix: str, layer: nn.Module, group: ExpertGroup) -> None:
    if not isinstance(layer, nn.ModuleDict):
        for key, p in layer.named_parameters(recurse=False):
            state[prefix + key] = group.gather(p.detach())
        return
    for i, expert in enumerate(list(layer.values())):
        own = layer.sharding.names[group.rank * len(layer) + i]
        for key in expert.state_dict():
            whole = group.gather(state[f"{prefix}{own}.{key}"][None])
            for rank, part in enumerate(whole):
                name = layer.sharding.names[rank * len(layer) + i]
                state[f"{prefix}{name}.{key}"] = part.clone()
