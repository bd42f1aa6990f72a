"""Samplers and loaders of batches that are drawn at random."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, List, Optional, Tuple

import numpy as np
import torch
import torch.distributed as dist
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from opacus_ext.refused import Refused, waited_in_vain
from opacus_ext.tables import in_a_line


class _SharedOut:
    """Samplers whose batches are shares already, if there are several processes."""

    @property
    def batch_size(self) -> int:
        """
        Refuses what would share the batches out once more (Accelerate asks for it).
        One process has no such attribute.
        """
        place = getattr(self, "place", None) or (0, 1)
        if place[1] == 1:
            raise AttributeError("batch_size")
        raise Refused(
            "The loader of make_private was prepared once more (Accelerate's prepare): "
            "it gives each process its share already, and each would be given every "
            "other batch of these.",
            parameter="data_loader",
            remedy="Call accelerator.prepare with model, optimizer and loader before "
            "make_private, and use what make_private returns as it is.",
        )


class _Epoch:
    """The batches of an epoch that are drawn at once, and the step of the first."""

    first = -1
    allocation: Any = None


class Draws(_SharedOut, UniformWithReplacementSampler):
    """
    The batches of an epoch, as lists of record numbers, drawn by a ``Sampling``.
    Opacus's ``BatchMemoryManager`` splits them, and secure mode gives them its
    generator. ``place`` is the number of this process among those that have samples of
    their own, and how many these are. All draw one batch, and each takes its share.
    """

    def __init__(
        self,
        sampling: Any,
        records: int,
        generator: Any = None,
        place: Optional[Tuple[int, int]] = None,
    ):
        super().__init__(
            num_samples=records,
            sample_rate=sampling.rate(records),
            generator=generator,
            steps=sampling.steps_per_epoch(records),
        )
        self.sampling = sampling
        self.place = place
        self.most = 0  # records of this batch in the process that has the most
        #: Gives the steps of the run so far, where its batches depend on them.
        self.taken: Optional[Callable[[], int]] = None
        #: The most batches that are drawn before the step of the first of them.
        self.ahead = 0
        self._expected: Optional[int] = None  # steps there must be after an epoch
        #: Gives the number of the next draw, where a run numbers them.
        self.numbered: Optional[Callable[[], int]] = None
        self.begun = 0  # epochs whose batches were drawn at once
        self.allocation: Any = None  # of the run; None if it is to be drawn anew
        self.keeper: Any = None  # keeps the allocation, if a checkpoint must have it
        self._epoch = _Epoch()  # of a run that numbers draws

    def __iter__(self) -> Iterator[List[int]]:
        number = self.taken or self.numbered
        first = 0 if number is None else number()
        epoch = _Epoch() if self.numbered is None else self._epoch
        expected = first if self._expected is None else self._expected
        self._check_steps(expected, expected)
        self._expected = None
        generator = self.generator if self.place is None else self._shared(first)
        first_own, processes = self.place or (0, 1)
        for step in range(first, first + self.steps):
            self._check_steps(max(first, step - self.ahead), step)
            drawn = self._draw(generator, step, epoch)
            self.most = math.ceil(len(drawn) / processes)
            yield drawn[first_own::processes].tolist()
        if self.taken is not None:
            self._expected = first + self.steps

    def _draw(self, generator: Any, step: int, epoch: _Epoch) -> torch.Tensor:
        sampling, records = self.sampling, self.num_samples
        if not sampling.allocates:
            return sampling.draw(records, generator, step)
        first = step - step % sampling.steps
        if first != epoch.first:
            self.begun += 1
            keeper = self if self.keeper is None else self.keeper
            epoch.first, epoch.allocation = first, keeper.allocation
            if epoch.allocation is None:
                epoch.allocation = sampling.allocate(records, generator)
            if sampling.keeps_allocation:
                keeper.allocation = epoch.allocation
        return sampling.batch(epoch.allocation, step)

    def _shared(self, first: int) -> torch.Generator:
        """
        Returns a generator that all processes have: each draws the whole batch, from
        the ``first`` step on.
        """
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        given = [seed, repr(self.sampling), self.num_samples, first]
        try:
            dist.broadcast_object_list(given)
        except RuntimeError as error:
            raise waited_in_vain(dist.get_rank(), error) from error
        if given[1:] != [repr(self.sampling), self.num_samples, first]:
            raise Refused(
                f"This process draws by {self.sampling} from {self.num_samples} "
                f"records after {first} steps, and process 0 by {given[1]} from "
                f"{given[2]} after {given[3]}.",
                parameter="sampling",
                remedy="Make them the same everywhere, and load a checkpoint in all.",
            )
        return torch.Generator().manual_seed(given[0])

    def _check_steps(self, least: int, most: int) -> None:
        """Refuses batches of a run that has made fewer or more steps."""
        if self.taken is None or least <= self.taken() <= most:
            return
        expected = least if self.taken() < least else most
        raise Refused(
            f"{self.taken()} steps were made, where the batches drawn so far ask for "
            f"{expected}. {type(self.sampling).__name__} draws from the parts of the "
            "data set in turn, so that no record is drawn twice in as many steps as "
            "there are parts.",
            parameter="sampling",
            remedy="Call optimizer.step() once for each batch of the loader, or use "
            'noise="independent". If something draws a batch ahead of the steps, as '
            "accelerate does, say so: loader.batch_sampler.ahead += 1.",
        )


class Counted:
    """
    Batches that are counted as they are asked for: by an optimizer of several
    processes, and by the loader's counter. An attempt after the last batch counts too:
    a loader with workers always asks for as many batches ahead, so that the count tells
    which batch the loop is at.
    """

    def __init__(
        self, batches: Iterator[List[int]], optimizer: Any, counter: Any = None
    ):
        self.batches, self.optimizer, self.counter = batches, optimizer, counter

    def __iter__(self) -> Iterator[List[int]]:
        return self

    def __next__(self) -> List[int]:
        if hasattr(self.optimizer, "drawn"):
            self.optimizer.drawn += 1
        if self.counter is not None:
            self.counter.ask()
        return next(self.batches)


class Splits(_SharedOut, BatchSplittingSampler):
    """
    The physical batches of ``BatchMemoryManager``: as many in each process as the one
    with the most records needs, so that the last may be empty.
    """

    @property
    def place(self) -> Optional[Tuple[int, int]]:
        """Returns the ``place`` of the sampler whose batches are split."""
        return getattr(self.sampler, "place", None)

    def __iter__(self) -> Iterator[List[int]]:
        if hasattr(self.sampler, "__dict__"):
            self.sampler.__dict__["is_split"] = True  # see loop.py
        if self.place is None:
            return self._told(super().__iter__())
        # Without workers only whole draws are counted (loop.py), so that
        # each process may split them as it needs.
        workers = self.optimizer.ahead_of_workers
        parts = self._told(self._parts())
        return Counted(parts, self.optimizer if workers else None)

    def _told(self, parts: Iterator[List[int]]) -> Iterator[List[int]]:
        """Notes the sizes of parts that workers collate."""
        counter = getattr(self.optimizer, "draws", None)
        ahead = getattr(self.optimizer, "ahead_of_workers", 0)
        for part in parts:
            if counter is not None and ahead:
                counter.sizes.append(len(part))
            yield part

    def _parts(self) -> Iterator[List[int]]:
        for own in self.sampler:
            count = max(math.ceil(self.sampler.most / self.max_batch_size), 1)
            for i, part in enumerate(np.array_split(np.array(own, int), count), 1):
                self.optimizer.signal_skip_step(do_skip=i < count)
                yield part.tolist()


def count_records(dataset: Dataset) -> int:
    """
    Returns the length of a data set. Refuses data sets whose records have no number.
    """
    if isinstance(dataset, IterableDataset):
        raise Refused(
            "The data set is an IterableDataset: its records can't be drawn.",
            parameter="data_loader",
            remedy="Use a data set with __getitem__ and __len__.",
        )
    return len(dataset)  # type: ignore[arg-type]


class _Shown:
    """Shows a loader in a line."""

    dataset: Any
    batch_sampler: Any

    def __repr__(self) -> str:
        records = len(self.dataset)
        rate = getattr(self.batch_sampler, "sample_rate", None)
        return in_a_line(
            self,
            type(self.dataset).__name__,
            records=records,
            expected_batch_size=None if rate is None else float(rate * records),
            batches=len(self.batch_sampler),
        )


class PoissonLoader(_Shown, DPDataLoader):
    """Opacus's loader of Poisson batches."""


class DrawnLoader(_Shown, DataLoader):
    """A loader of the batches that a :class:`Draws` draws."""


def loader_like(
    stock: DataLoader,
    dataset: Dataset,
    batch_sampler: Any,
    collate_fn: Callable,
    generator: Any = None,
) -> DataLoader:
    """Returns a loader of other batches, with the workers of ``stock``."""
    return DrawnLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate_fn,
        generator=generator,
        num_workers=stock.num_workers,
        pin_memory=stock.pin_memory,
        timeout=stock.timeout,
        worker_init_fn=stock.worker_init_fn,
        multiprocessing_context=stock.multiprocessing_context,
        prefetch_factor=stock.prefetch_factor,
        persistent_workers=stock.persistent_workers,
    )
