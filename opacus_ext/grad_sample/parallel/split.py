"""Models whose parameters are split within a computation; see core/split.py."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP

from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.model import PrivateModel
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.sharded import gathered
from opacus_ext.grad_sample.core.split import (
    SplitSum,
    check_same_samples,
    data_place,
    split_mesh,
)
from opacus_ext.refused import Refused


class SplitModel(PrivateModel):
    """A private model that ``parallelize_module`` has split over processes."""

    is_shared_out = True

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.vmap_fails = True
        self.mesh = split_mesh(module.parameters())

    def run(self, forward: ForwardRecord) -> None:
        """Runs the samples one by one, in all processes together."""
        assert self.mesh is not None
        check_same_samples(self.mesh, forward.inputs.samples)
        super().run(forward)

    def sum_of(self, kind: type) -> Callable[..., ClippedSum]:
        """Returns the clipped sum of this model; all modes have the same."""
        return partial(SplitSum, self.mesh)


def is_split_alone(module: nn.Module) -> bool:
    """
    Returns True for a model that ``parallelize_module`` has split over all processes,
    so that none has samples of its own.
    """
    if isinstance(module, FSDPModule):
        return False
    mesh = split_mesh(module.parameters())
    if mesh is None:
        return False
    if isinstance(module, (DDP, DPDDP)) or mesh.size() != dist.get_world_size():
        raise Refused(
            f"{type(module).__name__} is split by parallelize_module over "
            f"{mesh.size()} of {dist.get_world_size()} processes, or wrapped for data "
            "parallelism.",
            module=type(module).__name__,
            remedy="Split it over all processes, or call fully_shard on it over the "
            "other dimension of the mesh.",
        )
    return True


def place_of(module: nn.Module) -> tuple[int, int] | None:
    """
    Returns the number of this process among those that have samples of their own, and
    how many these are; None for a model of one process.
    """
    if isinstance(module, FSDPModule):
        meshes = [getattr(p, "device_mesh", None) for p in module.parameters()]
        if not any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
            return data_place(None)
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        return data_place(split_mesh(gathered(module, units).values()))
    if isinstance(module, (DDP, DPDDP)):
        return data_place(None)
    return (0, 1) if is_split_alone(module) else None
