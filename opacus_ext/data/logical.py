"""
Logical batches for loops that take a fixed number of items per step
(``gradient_accumulation_steps`` of transformers). Each item is a list of physical
batches.
"""

from __future__ import annotations

import hashlib
import math
import random
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from opacus_ext.data.draws import loader_like


class PhysicalBatch(NamedTuple):
    """
    The records of a logical batch that run together: how many they are, what the
    collator made of them, the number of the logical batch, its size in all processes,
    and the number of this part. An empty batch has the inputs of a record that is not
    drawn, or None.
    """

    records: int
    inputs: Any
    draw: int
    drawn: int = 0
    part: int = 0


class _Item(NamedTuple):
    numbers: List[List[int]]  # of records, by physical batch
    draw: int
    seed: int
    drawn: int
    part: int  # of the first physical batch


class LogicalBatches(Sampler):
    """
    Splits the logical batches that another sampler draws.

    The batches are numbered over all epochs, and a draw depends on nothing but the seed
    and its number. So no batch is drawn twice, even if an epoch ends early, and a run
    that was stopped goes on with the batches that it would have had. In secure mode no
    seed fixes them, and it goes on with new ones.

    Args:
        draws: gives the record numbers of each logical batch
        generator: random numbers of ``draws``
        physical_batch_size: the most records of a physical batch
        items: number of items of a logical batch, each of one physical batch. If there
            are more batches, the first item has the rest; if fewer, the first are empty
        seed: of all draws
        start: returns the number of the next draw that training takes. It is called
            when an iteration begins, so that draws that an earlier iteration made
            ahead, and training has not taken, are made again
        process: number of this process, and of all processes. Each has its share of a
            batch, and all have the same number of physical batches
    """

    def __init__(
        self,
        draws: Any,
        generator: Any,
        physical_batch_size: int,
        *,
        items: int,
        seed: int,
        start: Callable[[], int],
        process: Tuple[int, int] = (0, 1),
    ):
        self.process = process
        self.draws, self.generator = draws, generator
        self.physical_batch_size, self.items = physical_batch_size, items
        self.seed, self.start = seed, start

    def __len__(self) -> int:
        return len(self.draws) * self.items

    def __iter__(self) -> Iterator[_Item]:
        draws, start = iter(self.draws), self.start()
        sampling = getattr(self.draws, "sampling", None)
        for draw in range(start, start + len(self.draws)):
            if isinstance(self.generator, torch.Generator):  # not of secure mode
                first = draw if sampling is None else sampling.drawn_at(draw)
                self.generator.manual_seed(derive_seed(self.seed, "draw", first))
            drawn = np.array(next(draws), int)
            rank, processes = self.process
            most = math.ceil(len(drawn) / processes)
            # As Opacus's BatchMemoryManager splits them, but an empty one is one.
            count = max(math.ceil(most / self.physical_batch_size), 1)
            split = [x.tolist() for x in np.array_split(drawn[rank::processes], count)]
            over = max(count - self.items + 1, 0)
            items = [split[:over], *([x] for x in split[over:])]
            items[1:1] = [[]] * (self.items - len(items))
            for i, numbers in enumerate(items):
                seed = derive_seed(self.seed, "records", draw, i, *[rank] * (rank > 0))
                part = sum(len(x) for x in items[:i])
                yield _Item(numbers, draw, seed, len(drawn), part)


class _PhysicalBatches(Dataset):
    """Collates an item of LogicalBatches."""

    def __init__(self, dataset: Dataset, collate: Callable[[list], Any], example: bool):
        self.dataset, self.collate, self.example = dataset, collate, example

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, item: _Item) -> List[PhysicalBatch]:
        # Random records and masks are the same in whatever process and order.
        with seeded(item.seed):
            return [
                self._collated(numbers, item.draw, item.drawn, part)
                for part, numbers in enumerate(item.numbers, item.part)
            ]

    def _collated(self, numbers: List[int], *logical: int) -> PhysicalBatch:
        if not (numbers or self.example):
            return PhysicalBatch(0, None, *logical)
        some = numbers or [0]
        if hasattr(self.dataset, "__getitems__"):
            records = self.dataset.__getitems__(some)
        else:
            records = [self.dataset[i] for i in some]
        return PhysicalBatch(len(numbers), self.collate(records), *logical)


def logical_loader(
    dataset: Dataset,
    batches: LogicalBatches,
    collate: Callable[[list], Any],
    stock: Optional[DataLoader] = None,
    example: bool = False,
    **kwargs: Any,
) -> DataLoader:
    """
    Returns a loader whose items are lists of physical batches. ``collate`` turns a list
    of records into the inputs of one. Its workers are those of ``stock``, or of
    ``kwargs``. With ``example`` a batch without records has the inputs of record 0.
    """
    collated = _PhysicalBatches(dataset, collate, example)
    if stock is not None:
        return loader_like(stock, collated, batches, _as_it_is)
    return DataLoader(collated, batch_sampler=batches, collate_fn=_as_it_is, **kwargs)


def _as_it_is(item: List[PhysicalBatch]) -> List[PhysicalBatch]:
    return item


def derive_seed(*key: Union[int, str]) -> int:
    """
    Returns a seed made of a key. Seeds of two keys tell nothing about each other.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it, random numbers of the CPU come from ``seed``."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
