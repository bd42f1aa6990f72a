"""The processes that share experts, and what they tell each other."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, List, Optional

import torch
import torch.distributed as dist

from opacus_ext.refused import Refused


class ProcessFailure(Refused):
    """What went wrong in another process, or between them."""


class ExpertGroup:
    """
    The processes that share the experts, as one of them sees it.

    Args:
        group: a process group; None for all processes

    Attributes:
        rank: number of this process in the group
        size: number of processes
        batch_sizes: samples that each process has in this step
    """

    def __init__(self, group: Optional[dist.ProcessGroup] = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.batch_sizes: List[int] = [0] * self.size

    def __deepcopy__(self, memo: dict) -> "ExpertGroup":
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

    def per_sample(self, values: Iterable[float], **kwargs: Any) -> torch.Tensor:
        """One value a process as one value a sample, ``[B of all]``."""
        repeats = torch.tensor(self.batch_sizes)
        return torch.tensor(list(values)).repeat_interleave(repeats).to(**kwargs)

    @contextmanager
    def forward_pass(self, device: torch.device) -> Iterator[None]:
        """
        A forward pass of all processes.

        Raises:
            ProcessFailure: if another process refuses its own
        """
        nothing = torch.zeros(self.size, dtype=torch.long, device=device)
        try:
            yield
        except ProcessFailure:
            raise
        except BaseException:
            self._each_count(nothing - 1)
            raise
        self.exchange_counts(nothing)

    def begin_pass(self, batch_size: int, compare: bool, device: torch.device) -> bool:
        """
        Tells all others how many samples this process has.

        Args:
            compare: whether it would compare the model with itself

        Returns:
            Whether one of them would.
        """
        counts = torch.full((self.size,), 2 * batch_size + compare, device=device)
        found = self.exchange_counts(counts)
        self.batch_sizes = [n // 2 for n in found]
        return any(n % 2 for n in found)

    def exchange_counts(self, counts: torch.Tensor) -> List[int]:
        """
        Tells each process a count, ``[processes]``, and is told one by each.

        Raises:
            ProcessFailure: if another process refuses this pass
        """
        found = self._each_count(counts)
        if min(found) < 0:
            raise ProcessFailure(
                "Another process refuses this step; its error says why. No weight was "
                "changed."
            )
        return found

    def _each_count(self, counts: torch.Tensor) -> List[int]:
        ones = [1] * self.size
        return self.exchange(counts, ones, ones).tolist()

    def largest(self, *values: int, device: torch.device) -> List[int]:
        """The largest of each value over all processes."""
        x = torch.tensor([int(value) for value in values], device=device)
        self._run(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        return x.tolist()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        dense = x.contiguous()
        self._run(dist.all_reduce, dense)
        return x if dense is x else x.copy_(dense)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape from all processes, along dim 0."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(dist.all_gather, parts, x)
        return torch.cat(parts)

    def exchange(
        self, x: torch.Tensor, send: List[int], receive: List[int]
    ) -> torch.Tensor:
        """Sends ``send[i]`` rows to process i, which come one after the other."""
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._run(dist.all_to_all_single, out, x.contiguous(), receive, send)
        return out

    def _run(self, collective: Callable, *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, group=self.group, **kwargs)
        except RuntimeError as error:  # DistBackendError is one
            raise ProcessFailure(
                f"Process {self.rank} of {self.size} waited in vain for the others "
                f"({error}). One of them has died, failed or come too late (see the "
                "timeout of init_process_group). This step was not taken here:",
                remedy="start all processes again from the last checkpoint.",
            ) from error
