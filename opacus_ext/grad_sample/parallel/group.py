"""The processes that share experts, and what they tell each other."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from opacus_ext.refused import ProcessFailure, failed_elsewhere, waited_in_vain

# Positions in a forward pass beside the layers, which have numbers of their own.
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
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # NCCL sends only what is on a GPU.
        self.device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        self.batch_sizes: list[int] = [0] * self.size
        self.silent = False

    def __deepcopy__(self, memo: dict) -> ExpertGroup:
        # A process group can't be copied, and copies of a model share it.
        return self

    @property
    def batch_size(self) -> int:
        """Samples of all processes."""
        return sum(self.batch_sizes)

    @property
    def own_samples(self) -> slice:
        """This process's samples among those of all."""
        start = sum(self.batch_sizes[: self.rank])
        return slice(start, start + self.batch_sizes[self.rank])

    def meet(self, position: int, counts: Sequence[int] = ()) -> list[int]:
        """
        Tells each process a count (zeros if there are none), and is told one by each.
        All must be at the same position of a forward pass.
        """
        messages = [[count, position] for count in counts or [0] * self.size]
        tensor = torch.tensor(messages, device=self.device)
        # Each process sends one row to each.
        ones = [1] * self.size
        answers, positions = zip(*self.exchange(tensor, ones, ones).tolist())
        # A process that fails reads no answer: the others may be anywhere.
        if position == FAILED or set(positions) == {position}:
            return list(answers)
        if FAILED in positions:
            raise failed_elsewhere(positions.index(FAILED), 0)
        raise ProcessFailure(
            "Some processes leave out a layer of experts, or repeat one, by what their "
            "samples hold. No weight was changed.",
            remedy="Run each layer for all samples.",
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        dense = tensor.contiguous()
        self._run(dist.all_reduce, dense)
        return tensor if dense is tensor else tensor.copy_(dense)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same shape from all processes, along dim 0."""
        dense = tensor.contiguous()
        parts = [torch.empty_like(dense) for rank in range(self.size)]
        self._run(dist.all_gather, parts, dense)
        return torch.cat(parts)

    def exchange(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        """Sends ``send[i]`` rows to process i, which come one after the other."""
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        rows = tensor.contiguous()
        self._run(dist.all_to_all_single, received, rows, receive, send)
        return received

    def _run(self, collective: Callable, *args: Any) -> None:
        try:
            collective(*args, group=self.group)
        # DistBackendError, of a process that is gone or too late, is a RuntimeError.
        except RuntimeError as error:
            raise waited_in_vain(self.rank, error) from error
