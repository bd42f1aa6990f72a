"""The batches of an epoch: what a sampling draws, and that each of them is one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional

import torch
import torch.distributed as dist
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.data.sampling import Sampling


class Draws(UniformWithReplacementSampler):
    """
    The batches of an epoch, as lists of record numbers. Opacus's
    ``BatchMemoryManager`` splits them, and in secure mode gives them its generator.

    Example:
        >>> from opacus_ext.data import FixedSize
        >>> draws = Draws(FixedSize(batch_size=3), 12, torch.Generator())
        >>> [len(batch) for batch in draws]
        [3, 3, 3, 3]
    """

    def __init__(
        self,
        sampling: Sampling,
        records: int,
        generator: Any = None,
        distributed: bool = False,
    ):
        super().__init__(
            num_samples=records,
            sample_rate=sampling.rate(records),
            generator=generator,
            steps=sampling.steps_per_epoch(records),
        )
        self.sampling = sampling
        self.rank, self.processes = 0, 1
        if distributed:
            self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        #: How many steps of the run have been taken, where its batches depend on that.
        self.taken: Optional[Callable[[], int]] = None
        #: How many batches are drawn before the step of the first of them, at most.
        self.ahead = 0
        self._last: Optional[int] = None  # the steps there must be after an epoch

    def __iter__(self) -> Iterator[List[int]]:
        first = 0 if self.taken is None else self.taken()
        last = first if self._last is None else self._last
        self._check_steps(last, last)
        self._last = None
        generator = self._shared() if self.processes > 1 else self.generator
        for step in range(first, first + self.steps):
            self._check_steps(max(first, step - self.ahead), step)
            drawn = self.sampling.draw(self.num_samples, generator, step)
            yield drawn[self.rank :: self.processes].tolist()
        if self.taken is not None:
            self._last = first + self.steps

    def _shared(self) -> torch.Generator:
        """
        The same in all processes: each draws the whole batch of an epoch's steps, as
        one process would, and takes its share of it.
        """
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        given = [seed, repr(self.sampling), self.num_samples]
        dist.broadcast_object_list(given)
        if given[1:] != [repr(self.sampling), self.num_samples]:
            raise Refused(
                f"This process draws by {self.sampling} from {self.num_samples} "
                f"records, and process 0 by {given[1]} from {given[2]}.",
                parameter="sampling",
                remedy="Make them the same everywhere.",
            )
        return torch.Generator().manual_seed(given[0])

    def _check_steps(self, least: int, most: int) -> None:
        """
        Raises:
            Refused: unless so many steps have been taken
        """
        if self.taken is None or least <= self.taken() <= most:
            return
        expected = least if self.taken() < least else most
        raise Refused(
            f"{self.taken()} steps were made, where the batches drawn so far ask for "
            f"{expected}. Those of {type(self.sampling).__name__} are drawn from parts "
            "of the data set in turn, so that the records of one are in no other of "
            "as many steps.",
            parameter="sampling",
            remedy="Call optimizer.step() once for each batch of the loader, or use "
            'noise="independent". If something draws a batch ahead of the steps, as '
            "accelerate does, say so: loader.batch_sampler.ahead += 1.",
        )
