"""What the loop does that make_private's loader and optimizer can see.

The loader counts the records of each batch, and where it begins anew a logical batch
that was left in the middle is dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Callable, Iterator, List, Optional

from torch.utils.data import DataLoader, get_worker_info

from opacus_ext.grad_sample.adapter.inputs import InputReader


class CountingCollate:
    """
    A collate function that tells a private model how many records were drawn. In a
    worker process it tells nothing. Where the first draw is empty, Opacus's takes the
    form of a batch from a record.

    Args:
        collate: the loader's own
        dataset: that records are drawn from
        inputs: of the private model
    """

    def __init__(
        self,
        collate: Callable[[List], Any],
        dataset: Any,
        inputs: Optional[InputReader] = None,
    ):
        self.collate: Any = collate
        self.dataset = dataset
        self._inputs = weakref.ref(inputs) if inputs is not None else lambda: None

    def __call__(self, records: List) -> Any:
        inputs = self._inputs()
        if inputs is not None and get_worker_info() is None:
            inputs.drawn.add(len(records))
        own = getattr(self.collate, "wrapped_collator_fn", None)
        if own is not None and not records and self.collate.first_batch is None:
            self.collate.first_batch = own([self.dataset[0]])
        return self.collate(records)

    def __reduce__(self) -> Any:  # worker processes need the loader's own
        return CountingCollate, (self.collate, self.dataset)


def watch_loader(loader: DataLoader, optimizer: Any, inputs: InputReader) -> None:
    """
    Args:
        loader: as make_private returns it; it is changed
        optimizer: the DP optimizer
        inputs: of the private model
    """
    loader.collate_fn = CountingCollate(loader.collate_fn, loader.dataset, inputs)
    optimizer.ahead = loader.num_workers * (loader.prefetch_factor or 0)
    batches: Any = loader.batch_sampler
    kind, own, reader = type(batches), weakref.ref(optimizer), weakref.ref(inputs)
    # Of the batches that may be at hand, as workers and loops draw ahead.
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    sizes: deque[int] = deque(maxlen=4 + ahead)

    def begin(self: Any) -> Iterator[List[int]]:
        dp_optimizer, known = own(), reader()
        if hasattr(dp_optimizer, "drop_logical_batch"):  # not one of Opacus's own
            dp_optimizer.drop_logical_batch()
        largest = 0
        for batch in kind.__iter__(self):
            sizes.append(len(batch))
            largest = max(largest, len(batch))
            if known is not None:
                known.most = max(sizes)
            yield batch
        if known is not None:
            known.most = largest  # a list of all of them may be gone through

    # A method that Python looks up on the class: so the sampler gets one of its own.
    watched = type(kind.__name__, (kind,), {"__iter__": begin})
    if isinstance(batches, (list, tuple)):  # whose class is fixed
        vars(loader)["batch_sampler"] = watched(batches)
    else:
        batches.__class__ = watched
