"""Parameters that are split within the computation of a sample (tensor parallel).

``parallelize_module`` makes them DTensors, of which each process of a mesh has a part,
and these processes compute a sample together. vmap can't run that, so samples run one
by one, as the model is. Each process has its part of a sample's gradient, and the
squared norms are summed over the mesh.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.core.groups import Samples
from opacus_ext.refused import Refused

T = torch.Tensor


def split_mesh(params: Iterable[T]) -> DeviceMesh | None:
    """Returns the mesh that parameters are split over; None if they are not."""
    meshes = list({p.device_mesh: 0 for p in params if isinstance(p, DTensor)})
    if not meshes:
        return None
    ranks = [mesh.mesh.tolist() for mesh in meshes]
    if meshes[0].ndim > 1 or any(some != ranks[0] for some in ranks):
        raise Refused(
            "Parameters are split within a computation over several meshes, or one of "
            "several dimensions.",
            remedy="Split all by parallelize_module over one dimension, as in "
            'mesh["tp"], and the rest by fully_shard.',
        )
    return meshes[0]


def is_split(p: T) -> bool:
    """Returns True if this process has only a part of a parameter."""
    kinds = p.placements if isinstance(p, DTensor) else ()
    return not all(isinstance(kind, Replicate) for kind in kinds)


def check_same_samples(mesh: DeviceMesh, samples: Sequence[Samples]) -> None:
    """Refuses samples that are not the same in all processes of a mesh."""
    size, sums = sum(some.size for some in samples), [0.0]
    for x in (x for some in samples for x in some.leaves if isinstance(x, T)):
        flat = x.detach().flatten().double().nan_to_num()
        weights = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=x.device)
        sums.append(float(flat @ weights))
    said = [float(size), sum(sums)]
    found = _gather(mesh, torch.tensor(said, dtype=torch.float64))
    if bool((found != found[:1]).any()):
        raise Refused(
            "Processes that compute a sample together (tensor parallel) have different "
            "samples.",
            remedy="Give all processes of the mesh the same batch: the loader that "
            "make_private returns does.",
        )


def _gather(mesh: DeviceMesh, x: T) -> T:
    """Returns a tensor of all processes of a mesh, ``[processes, *shape]``."""
    x = x.to(mesh.device_type)
    parts = [torch.empty_like(x) for _ in range(mesh.size())]
    dist.all_gather(parts, x, group=mesh.get_group())
    return torch.stack(parts)


class SplitSum(ClippedSum):
    """
    The clipped sum of gradients of which each process of a mesh has a part. Samples are
    added one by one, by all processes of the mesh together.

    Args:
        mesh: what the parameters are split over; None if they are whole
        given: of :class:`~core.clip.ClippedSum`
    """

    def __init__(self, mesh: DeviceMesh | None, *given: Any):
        super().__init__(*given)
        self.mesh = mesh
        self.is_split = torch.tensor([[is_split(p)] for p in self.params])

    def _own(self, p: Any, grad: T) -> T:
        if not isinstance(grad, DTensor):
            return grad
        return grad.redistribute(placements=p.placements).to_local()

    def _whole_norms(self, norms: T) -> T:
        if self.mesh is None:
            return norms
        every = _gather(self.mesh, norms.square())
        first, is_split = every[0], self.is_split.to(every.device)
        differ = (every - first).abs() > 0.01 * first  # rounding is far less
        for i in (differ.any(0) & ~is_split).nonzero()[:1, 0].tolist():
            raise Refused(
                f"Processes that compute a sample together (tensor parallel) all have "
                f"{self.names[i]}, and different gradients of it: each one's is of its "
                "heads, tokens or experts.",
                parameter=self.names[i],
                remedy="Freeze it, or let the plan of parallelize_module make it a "
                "DTensor, as SequenceParallel does.",
            )
        return torch.where(is_split, every.sum(0), first).sqrt().to(norms.device)

    def sums(self) -> dict[str, T]:
        """Returns this process's parts of the clipped sums, by name."""
        parts = zip(self.names, self.params, self._totals)
        return {name: _with_parts(p, total) for name, p, total in parts}


def _with_parts(p: T, total: T | None) -> T:
    """Returns a sum that is split as its parameter; see ``sums_by_name``."""
    own = p.to_local() if isinstance(p, DTensor) else p
    dtype = torch.promote_types(p.dtype, torch.float32)
    total = torch.zeros_like(own, dtype=dtype) if total is None else total
    return as_split(p, total.detach().to(own.device, dtype))


def as_split(p: T, part: T) -> T:
    """Returns this process's part as a tensor that is split as a parameter is."""
    if not isinstance(p, DTensor):
        return part
    size: Any = dict(shape=p.shape, stride=p.stride())
    return DTensor.from_local(part, p.device_mesh, p.placements, **size)


def data_place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """
    Returns the number of this process among those that have samples of their own, and
    how many these are; processes of the mesh have the same samples, and one number.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if mesh is None:
        return rank, size
    if mesh.size() == size:
        return 0, 1
    firsts: list[Any] = [None] * size
    dist.all_gather_object(firsts, int(mesh.mesh.min()))
    groups = sorted(set(firsts))
    return groups.index(firsts[rank]), len(groups)
