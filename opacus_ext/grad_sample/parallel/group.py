"""The processes that share experts, and what they tell each other."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from opacus_ext.refused import ProcessFailure, failed_elsewhere, waited_in_vain

# Places in a forward pass beside the layers, which have numbers of their own.
BEGIN, END, FAILED = -1, -2, -3


class ExpertGroup:
    """
    The processes that share the experts, as one of them sees it: a process group, or
    all processes.

    Attributes:
        rank: number of this process in the group
        size: number of processes
        batch_sizes: samples that each process has in this pass
        silent: whether layers of experts give zeros, without an exchange
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        self.batch_sizes: list[int] = [0] * self.size
        self.silent = False

    def __deepcopy__(self, memo: dict) -> ExpertGroup:
        return self  # a process group can't be copied

    @property
    def batch_size(self) -> int:
        """Samples of all processes."""
        return sum(self.batch_sizes)

    @property
    def own_samples(self) -> slice:
        """This process's samples among those of all."""
        start = sum(self.batch_sizes[: self.rank])
        return slice(start, start + self.batch_sizes[self.rank])

    def meet(self, place: int, counts: Sequence[int] = ()) -> list[int]:
        """
        Tells each process a count (zeros if there are none), and is told one by each.
        All must be at the same place of a forward pass.
        """
        given = [[count, place] for count in counts or [0] * self.size]
        ones, x = [1] * self.size, torch.tensor(given, device=self.device)
        found, places = zip(*self.exchange(x, ones, ones).tolist())
        if place == FAILED or set(places) == {place}:
            return list(found)
        if FAILED in places:
            raise failed_elsewhere(places.index(FAILED), 0)
        raise ProcessFailure(
            "Some processes leave out a layer of experts, or repeat one, by what their "
            "samples hold. No weight was changed.",
            remedy="Run each layer for all samples.",
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        dense = x.contiguous()
        self._run(dist.all_reduce, dense)
        return x if dense is x else x.copy_(dense)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape from all processes, along dim 0."""
        parts = [torch.empty_like(x.contiguous()) for _ in range(self.size)]
        self._run(dist.all_gather, parts, x.contiguous())
        return torch.cat(parts)

    def exchange(
        self, x: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        """Sends ``send[i]`` rows to process i, which come one after the other."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._run(dist.all_to_all_single, out, x.contiguous(), receive, send)
        return out

    def _run(self, collective: Callable, *args: Any) -> None:
        try:
            collective(*args, group=self.group)
        except RuntimeError as error:  # DistBackendError is one
            raise waited_in_vain(self.rank, error) from error
