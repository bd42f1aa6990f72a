"""Draws of every loader, as the training loop gets its batches.

Counted are draws of each record, of each pair of records in one batch, and of each pair
in two successive batches. tests/sampling_test.py tests the distribution of whole draws.
"""

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

from opacus_ext.data import Poisson, UserRecords
from opacus_ext.data.draws import Draws
from opacus_ext.data.logical import LogicalBatches, logical_loader
from opacus_ext.data.sampling import CyclicPoisson
from tests.common import make_private

from .statistics import fits

RECORDS, RATE, BATCHES = 12, 0.25, 2000


def data(each=1):
    return TensorDataset(torch.arange(RECORDS).repeat_interleave(each))


def private(sampling=None, dataset=None):
    kwargs = {} if sampling is None else {"sampling": sampling}
    return make_private(
        nn.Linear(1, 1),
        "ghost_bk",
        batch_size=3,
        dataset=dataset or data(),
        poisson_sampling=True,
        accountant="prv_bounds",
        **kwargs,
    )


def of_loader(sampling=None, dataset=None):
    """Batches of the loader of make_private, over many epochs."""
    loader = private(sampling, dataset).loader
    while True:
        epoch = [x.tolist() for (x,) in loader]
        assert len(epoch) == len(loader) == 4
        yield from epoch


def of_users():
    """Batches of users, each of whom has three records."""
    users = [i for i in range(RECORDS) for _ in "abc"]
    return of_loader(dataset=UserRecords(data(each=3), users))


def in_parts(sampling=None):
    """Logical batches of BatchMemoryManager, joined as the optimizer joins them."""
    made = private(sampling)
    queue, whole = made.optimizer._step_skip_queue, []
    with BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=2, optimizer=made.optimizer
    ) as loader:
        while True:
            for (x,) in loader:
                assert len(x) <= 2
                whole += x.tolist()
                if not queue.pop(0):
                    yield whole
                    whole = []


def of_items():
    """Batches of the trainers: the records in all items and parts of a step."""
    generator = torch.Generator()
    draws = Draws(Poisson(sample_rate=RATE), RECORDS, generator)
    seed = int(torch.randint(2**60, ()))
    taken = 0
    batches = LogicalBatches(
        draws, generator, 2, items=2, seed=seed, start=lambda: taken
    )
    loader = logical_loader(torch.arange(RECORDS), batches, torch.stack)
    while True:
        for first, second in zip(*[iter(loader)] * 2):
            parts = [part for part in (*first, *second) if part.records]
            yield [i for part in parts for i in part.inputs.tolist()]
            taken += 1


LOADERS = {
    "Opacus's": of_loader,
    "Poisson": lambda: of_loader(Poisson(sample_rate=RATE)),
    "users": of_users,
    "parts": in_parts,
    "parts of Poisson": lambda: in_parts(Poisson(sample_rate=RATE)),
    "items": of_items,
}


def counts(batches, number=BATCHES):
    """How often each record is in each batch ``[batches, records]``."""
    found = np.zeros((number, RECORDS))
    for row, batch in zip(found, batches):
        np.add.at(row, np.array(batch, int), 1)
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_records_are_drawn_as_is_accounted_for(name):
    torch.seed()
    drawn = counts(LOADERS[name]())
    assert drawn.max() <= 1, "a record twice in a batch"
    fits(drawn.sum(0), RATE, BATCHES, "a record")
    pairs = np.triu_indices(RECORDS, 1)
    fits((drawn.T @ drawn)[pairs], RATE**2, BATCHES, "a pair")
    first, second = drawn[::2], drawn[1::2]
    fits(first.T @ second, RATE**2, BATCHES // 2, "one after the other")


def test_parts_of_the_data_set_in_turn():
    """No record is drawn twice in as many batches as there are bands."""
    torch.seed()
    bands = 3
    sampling = CyclicPoisson(bands=bands, sample_rate=RATE)
    draws = Draws(sampling, RECORDS, torch.Generator().manual_seed(torch.seed()))
    steps = range(BATCHES)
    drawn = counts(
        draws.sampling.draw(RECORDS, draws.generator, t).tolist() for t in steps
    )
    assert drawn.max() <= 1
    for part in range(bands):
        own = np.arange(RECORDS) % bands == part
        rows = drawn[part::bands]
        assert not rows[:, ~own].any()
        fits(rows[:, own].sum(0), bands * RATE, len(rows), "a record")
        first, second = rows[::2, own][: len(rows) // 2], rows[1::2, own]
        fits(first.T @ second, (bands * RATE) ** 2, len(second), "rounds")


def test_what_is_tested_is_seen():
    """A batch that comes twice, and a rate that is too high, do not pass."""
    rng = np.random.default_rng()
    right = rng.random((BATCHES, RECORDS)) < RATE
    fits(right.sum(0), RATE, BATCHES)
    again = right.copy()
    again[1::2] = again[::2]
    with pytest.raises(AssertionError):
        fits(again[::2].T.astype(float) @ again[1::2], RATE**2, BATCHES // 2)
    with pytest.raises(AssertionError):
        fits((rng.random((BATCHES, RECORDS)) < RATE * 1.6).sum(0), RATE, BATCHES)
