"""Logical batches in physical parts, as the items of one loader.

DP-SGD draws logical batches of any size. A training loop that takes a fixed number of
items a step (Trainer's ``gradient_accumulation_steps``) gets that many here, each a
list of parts that fit into memory.
"""

from __future__ import annotations

import hashlib
import math
import random
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class Part(NamedTuple):
    """
    A physical batch.

    Attributes:
        records: how many records of the data set it holds
        inputs: what the collator made of them; None if there are none
        draw: the number of the logical batch that it is a part of
    """

    records: int
    inputs: Any
    draw: int


class _Item(NamedTuple):
    parts: List[List[int]]
    draw: int
    seed: int


class LogicalBatches(Sampler):
    """
    Splits the logical batches that another sampler draws.

    They are numbered, over all epochs, and what is drawn depends on seed and number
    alone. So none is drawn twice, even where an epoch is left early, and a run that was
    stopped meets the batches that it had still to meet.

    Args:
        draws: gives the record numbers of each logical batch
        generator: the random numbers of ``draws``
        physical_batch_size: the most records of a part
        items: how many items a logical batch makes. The last one holds the last part;
            the first one has what is too much, or those in front are empty
        seed: of all draws
        first: number of the first one

    Example:
        >>> import torch
        >>> draws, some = [[0, 1, 2, 3, 4], [], [7]], torch.Generator()
        >>> for item in LogicalBatches(draws, some, 2, items=2, seed=0):
        ...     print(item.draw, item.parts)
        0 [[0, 1], [2, 3]]
        0 [[4]]
        1 []
        1 [[]]
        2 []
        2 [[7]]
    """

    def __init__(
        self,
        draws: Any,
        generator: torch.Generator,
        physical_batch_size: int,
        *,
        items: int,
        seed: int,
        first: int = 0,
    ):
        self.draws, self.generator = draws, generator
        self.physical_batch_size, self.items = physical_batch_size, items
        self.seed, self.next = seed, first

    def __len__(self) -> int:
        return len(self.draws) * self.items

    def __iter__(self) -> Iterator[_Item]:
        draws = iter(self.draws)
        for _ in range(len(self.draws)):
            draw, self.next = self.next, self.next + 1
            self.generator.manual_seed(derive_seed(self.seed, "draw", draw))
            parts = self._split(next(draws))
            single = parts[max(len(parts) - self.items + 1, 0) :]
            items = [parts[: len(parts) - len(single)]]
            items += [[] for _ in range(self.items - len(single) - 1)]
            items += [[part] for part in single]
            for i, item in enumerate(items):
                yield _Item(item, draw, derive_seed(self.seed, "records", draw, i))

    def _split(self, drawn: List[int]) -> List[List[int]]:
        """As Opacus's BatchMemoryManager splits."""
        count = max(math.ceil(len(drawn) / self.physical_batch_size), 1)
        return [part.tolist() for part in np.array_split(np.array(drawn, int), count)]


class _Parts(Dataset):
    """What items of LogicalBatches are made of, record by record."""

    def __init__(self, dataset: Dataset, collate: Callable[[list], Any]):
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, item: _Item) -> List[Part]:
        # By its own seed: what is random in records and masks is the same in whatever
        # process and order they are made.
        with _seeded(item.seed):
            return [self._part(numbers, item.draw) for numbers in item.parts]

    def _part(self, numbers: List[int], draw: int) -> Part:
        inputs = self.collate(self._records(numbers)) if numbers else None
        return Part(len(numbers), inputs, draw)

    def _records(self, numbers: List[int]) -> list:
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(numbers)
        return [self.dataset[i] for i in numbers]


def logical_loader(
    dataset: Dataset,
    batches: LogicalBatches,
    collate: Callable[[list], Any],
    **kwargs: Any,
) -> DataLoader:
    """
    A loader whose items are lists of parts.

    Args:
        dataset: with numbered records
        batches: what is drawn
        collate: makes the inputs of a part of the list of its records
        kwargs: of the loader, such as ``num_workers``

    Example:
        >>> batches = LogicalBatches([[0, 2, 3]], torch.Generator(), 2, items=1, seed=0)
        >>> loader = logical_loader(torch.arange(4) * 10, batches, torch.stack)
        >>> for part in next(iter(loader)):
        ...     print(part.records, part.inputs)
        2 tensor([ 0, 20])
        1 tensor([30])
    """
    parts = _Parts(dataset, collate)
    return DataLoader(parts, batch_sampler=batches, collate_fn=_as_it_is, **kwargs)


def _as_it_is(item: List[Part]) -> List[Part]:
    return item


def derive_seed(*key: Union[int, str]) -> int:
    """
    A seed made of others. Those of different keys tell nothing about each other.

    Example:
        >>> derive_seed(1, "noise") == derive_seed(1, "noise")
        True
        >>> derive_seed(1, 2) == derive_seed(2, 1)
        False
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
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
