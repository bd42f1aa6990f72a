"""DP optimizers of several processes."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from opacus_ext.grad_sample.core.sharded import in_buckets
from opacus_ext.grad_sample.factors import Scale
from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.optimizers.noise_aware import refuse_scales
from opacus_ext.optimizers.optimizer import (
    ClippingOptimizer,
    GhostDPOptimizer,
    HooksDPOptimizer,
)
from opacus_ext.private_torch import tree_leaves
from opacus_ext.refused import STAGES, ProcessFailure, Refused, failed_elsewhere

if TYPE_CHECKING:
    Base = ClippingOptimizer
else:
    Base = object  # a mixin comes before one of them


class _Distributed(Base):
    """
    Sums the gradients of processes that have samples of their own. The noise of a
    parameter is added once. If all processes have the parameter, process 0 adds it. For
    experts that are spread, and for shards of FSDP2, the process that has the share
    adds it, from a seed that process 0 draws in each step.
    """

    drawn = 0  # batches that the loader was asked for so far
    ahead_of_workers = 0  # the part of ``ahead`` that workers draw
    looks_ahead = 0  # a loader that Accelerate prepares is refused here

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._processes = ExpertGroup()
        self._refuse_differences()
        self._seed = 0
        self._generators: Dict[Tuple[Any, ...], torch.Generator] = {}

    def tell(self, stage: str) -> None:
        """
        Tells the other processes, when all meet next, at which stage this one has
        failed.
        """
        with suppress(ProcessFailure):
            self._refuse_differences(failed=1 + STAGES.index(stage))

    def _refuse_differences(self, skips: bool = False, failed: int = 0) -> None:
        """
        Refuses settings that differ between processes, as one adds the noise for all,
        and steps on different draws. ``failed`` is the stage, counted from one, at
        which this process has an error of its own, or 0: the others are told.
        """
        bounds = self.every_bound
        weighted = sum(i * bound for i, bound in enumerate(bounds, 1))
        # What workers draw ahead is the same in all processes; what a loop does isn't.
        alike = self.ahead == self.ahead_of_workers
        drawn = self.drawn - self.ahead if alike else 0
        size = self.expected_batch_size
        settings = [self.noise_multiplier, -1 if size is None else size, weighted]
        numbers = zlib.crc32(repr([*map(_numbers, self.param_groups)]).encode())
        numbers_here = [*settings, len(bounds), numbers, drawn, skips, failed]
        device = next((p.device for p in self.params), torch.device("cpu"))
        x = torch.tensor(numbers_here, dtype=torch.float64, device=device)
        everywhere = self._processes.gather(x[None])
        if failed:
            return
        for rank, stage in enumerate(everywhere[:, -1].tolist()):
            if stage:
                raise failed_elsewhere(rank, int(stage) - 1)
        *same, as_set, as_drawn, as_skipped, _ = (everywhere == x).all(0).tolist()
        if not all(same):
            raise Refused(
                "noise_multiplier, max_grad_norm or the expected batch size (the "
                "length of the data set and its loader) differ between processes; "
                f"here they are {self.noise_multiplier}, {bounds} and {size}.",
                remedy="Make them the same everywhere.",
            )
        if not as_set:
            rates = [group.get("lr") for group in self.param_groups]
            raise Refused(
                "Learning rates or other settings of the optimizer differ between "
                f"processes; here lr is {rates}.",
                parameter="lr",
                remedy="Step schedules in all processes alike: also after batches of "
                "which a process has no samples, and by what is summed over all.",
            )
        if not as_drawn and as_skipped:
            raise Refused(
                f"This process is at batch {drawn} of its loader, and others are at "
                "another one: their shares are of different draws.",
                remedy="Step on each batch in all processes, or leave the loop in all.",
            )
        if not as_skipped:
            raise Refused(
                "Some processes have more physical batches before this step, and "
                "others have none.",
                remedy="Where parameters are spread over processes, choose "
                "max_physical_batch_size so that all split alike, or none splits.",
            )

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``; a step is taken by all processes, or refused by all."""
        params = (p for group in self.param_groups for p in group["params"])
        skips = self._check_skip_next_step(pop_next=False)
        if not skips or any(map(self._is_sharded, params)):
            error: Optional[Exception] = None
            try:
                self._check_batches()
                self._check_same_bound()
                self._state_of_noise()
                self._check_gradients()
            except Exception as refused:
                error = refused
            self._refuse_differences(skips, len(STAGES) * (error is not None))
            if error is not None:
                raise error
        return super().pre_step(closure)

    def step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``; drops weights that FSDP2 gathered before the step."""
        loss = super().step(closure)
        shards = getattr(getattr(self.mode, "private", None), "shards", None)
        if shards is not None:
            shards.processes.reshard()
        return loss

    def _draws_noise(self) -> bool:
        return self.rank == 0  # or the seed of all shares

    def _generators_of(self, params: Sequence[Any]) -> List[Any]:
        return [self._generator_of(p) for p in params]

    def _generator_of(self, p: torch.nn.Parameter) -> Optional[torch.Generator]:
        if not self._is_sharded(p):
            if self.rank != 0:
                return None
            return self.generator or self._generator_for(p.device)
        key = p.device, *(self._share(p) or ())
        if key not in self._generators:
            number = zlib.crc32(repr(key[1:]).encode()) + 1
            seed = (self._seed + number * 0x9E3779B97F4A7C15) % 2**63
            self._generators[key] = torch.Generator(p.device).manual_seed(seed)
        return self._generators[key]

    def _share(self, p: Any) -> Optional[Tuple[Any, ...]]:
        """
        Returns the position of this process's share: its coordinate in each dimension
        of the mesh that cuts the parameter, which dimension of how many processes it
        is, and how it cuts. Copies of a share have the same position.
        """
        if group_of(p) is not None:
            return (("expert_parallel", self.rank, self.world_size, ""),)
        if not isinstance(p, DTensor):
            return () if self.rank == 0 else None
        mesh = p.device_mesh
        names = mesh.mesh_dim_names or range(mesh.ndim)
        at = zip(names, mesh.get_coordinate() or (), mesh.shape, p.placements)
        return tuple((*x, str(k)) for *x, k in at if not isinstance(k, Replicate))

    def _draw_seed(self) -> None:
        """Draws process 0's seed for the noise of all shares in one step."""
        device = next(p.device for p in self.params if self._is_sharded(p))
        draw = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rank == 0:
            generator = self._watched_generator()
            kind: Any = dict(generator=generator, device=generator.device)
            draw += torch.randint(2**62, (1,), **kind).to(device)
        self._seed = int(self._processes.sum(draw))
        self._generators.clear()

    def _is_sharded(self, p: torch.nn.Parameter) -> bool:
        """Returns True if each process adds the noise of its share of a parameter."""
        return group_of(p) is not None or isinstance(p, DTensor)

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's clipped gradient, over all processes."""
        if not self.clipping.per_parameter:
            return super().sensitivity
        bounds_of_params: Any = self.clipping_bound
        bounds = []
        for p, bound in zip(self.params, bounds_of_params):
            bounds += [bound] * (self.world_size if group_of(p) else 1)
        return self.clipping.at(bounds).sensitivity("add_or_remove_one")

    def take_scales(self) -> Dict[int, Scale]:
        """See ``ClippingOptimizer``; shares of parameters have no scales."""
        scales = super().take_scales()
        if scales and any(map(self._is_sharded, self.params)):
            refuse_scales(type(self.original_optimizer).__name__)
        return scales

    def add_noise(self) -> None:
        """Adds noise and sums over the processes; sets ``p.grad``."""
        if any(map(self._is_sharded, self.params)):
            self._draw_seed()
        super().add_noise()

    @property
    def divisor(self) -> float:
        """The expected batch size of all processes if the loss is a mean, else 1."""
        divisor = super().divisor  # the expected batch size is one process's
        return divisor * self.world_size if self.loss_reduction == "mean" else divisor

    def release(
        self, statistic: torch.Tensor, noise_multiplier: float, sensitivity: float
    ) -> torch.Tensor:
        """See ``NoisyOptimizer``; process 0 adds the noise."""
        if self.rank == 0:
            statistic = super().release(statistic, noise_multiplier, sensitivity)
        return self._processes.sum(statistic)

    def _sum_over_processes(self) -> None:
        totals = [p.summed_grad for p in self.params if not self._is_sharded(p)]
        for bucket in in_buckets(totals):
            flat = torch.cat([x.flatten() for x in bucket])
            parts = self._processes.sum(flat).split([x.numel() for x in bucket])
            torch._foreach_copy_(bucket, [y.view_as(x) for x, y in zip(bucket, parts)])


def _numbers(group: Dict[str, Any]) -> List[float]:
    """Returns the settings of a group of parameters that are numbers."""
    settings = tree_leaves([group[name] for name in sorted(group) if name != "params"])
    plain = [x.tolist() if isinstance(x, torch.Tensor) else x for x in settings]
    return [float(x) for x in plain if isinstance(x, (int, float))]


class DistributedHooksDPOptimizer(_Distributed, HooksDPOptimizer):
    """:class:`HooksDPOptimizer` of one of several processes."""


class DistributedGhostDPOptimizer(_Distributed, GhostDPOptimizer):
    """:class:`GhostDPOptimizer` of one of several processes."""
