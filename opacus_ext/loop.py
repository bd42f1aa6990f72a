"""
The parts of a training loop that the loader and the optimizer of ``make_private`` see:
how many records are drawn, where an epoch begins, and which steps are taken.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Set

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from opacus_ext.data.draws import Counted, Draws
from opacus_ext.data.logical import seeded
from opacus_ext.data.spent import DrawCounter, state_of
from opacus_ext.grad_sample.adapter.inputs import InputReader
from opacus_ext.grad_sample.adapter.mixing import (
    Sent,
    entries_of_batch,
    entries_of_records,
)
from opacus_ext.grad_sample.adapter.passes import Passes, mark
from opacus_ext.ledger import ledger_of, note_broken
from opacus_ext.optimizers.optimizer import ClippingOptimizer
from opacus_ext.private_torch import tree_leaves
from opacus_ext.refused import Refused, warn_once
from opacus_ext.views import StandIn

# -- the loader ------------------------------------------------------------------------


class CountingCollate:
    """
    A collate function that counts the drawn records for a private model, outside of
    worker processes, and keeps some entries of batches 1, 2, 4, 8, ..., with which the
    model's inputs are compared. It also makes batches without records that Opacus's
    collate function can't make: if the first draw is empty, or if batches contain other
    things than tensors. Their form is that of a batch of record 0.

    Args:
        collate: the loader's own collate function
        dataset: the data set that records are drawn from
        inputs: the private model's reader of inputs
        counter: of the loader, whose draws the batches are marked with
        key: of the monitor of the model's inputs, which a worker process names
    """

    def __init__(
        self,
        collate: Callable[[List], Any],
        dataset: Any,
        inputs: Optional[InputReader] = None,
        counter: Optional[DrawCounter] = None,
        key: int = -1,
    ):
        self.collate: Any = collate
        self.dataset, self.counter, self.key = dataset, counter, key
        self._batches = 0
        self._inputs = weakref.ref(inputs) if inputs is not None else lambda: None

    def __call__(self, records: List) -> Any:
        self._batches += 1
        inputs, size = self._inputs(), len(records)
        # Comparing waits for the device: only batches 1, 2, 4, 8, ... are compared.
        is_compared = size > 1 and self._batches & (self._batches - 1) == 0
        entries = entries_of_records(records) if is_compared else []
        batch = self._collated(records)
        if is_compared:
            entries += entries_of_batch(batch, size)
        if get_worker_info() is not None:
            return Sent(batch, self.key, entries) if entries else batch
        if inputs is not None:
            inputs.mixing.add(entries)
            inputs.ones = inputs.ones or size > 1 and _has_ones(batch)
        if self.counter is not None:
            self.counter.sizes.append(size)
            mark(batch, self.counter.collate(size))
        return batch

    def _collated(self, records: List) -> Any:
        own = getattr(self.collate, "wrapped_collator_fn", None)
        if own is None or records:
            return self.collate(records)
        if self.collate.first_batch is None:
            self.collate.first_batch = own([self.dataset[0]])
        if self._is_plain(self.collate.first_batch):
            return self.collate(records)
        with seeded(0):  # random numbers of the run stay as they are
            one = own([self.dataset[0]])
            two = own([self.dataset[0], self.dataset[0]])
        return self._without_records(one, two)

    def _is_plain(self, batch: Any) -> bool:
        """Returns True for values that Opacus's collate function empties correctly."""
        if isinstance(batch, torch.Tensor):
            return batch.dim() > (not self.collate.batch_first)
        if type(batch) not in (dict, list, tuple):
            return False
        parts = batch.values() if isinstance(batch, dict) else batch
        return all(map(self._is_plain, parts))

    def _without_records(self, one: Any, two: Any) -> Any:
        """Empties the batch of one record. Two records tell what there is for each."""
        rows = int(self.collate.rand_on_empty)
        if isinstance(one, torch.Tensor):
            if self._is_plain(one):
                return self.collate._make_empty_batch(one)
            return one.new_zeros([rows] * one.dim())
        if isinstance(one, np.ndarray):
            pairs = zip(one.shape, two.shape)
            shape = [rows if (n, m) == (1, 2) else n for n, m in pairs]
            return np.zeros(shape, one.dtype)
        if isinstance(one, Mapping):
            found = {key: self._without_records(one[key], two[key]) for key in one}
            try:
                return type(one)(found)  # type: ignore[call-arg]
            except TypeError:
                return found
        if isinstance(one, (list, tuple)):
            if (len(one), len(two)) == (1, 2):
                return type(one)([_blank(x) for x in one] * rows)
            parts = [self._without_records(*pair) for pair in zip(one, two)]
            return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
        if one is None or isinstance(one, _VALUES):
            return _blank(one)
        raise Refused(
            f"A draw has no records, and {type(one).__name__}, which the loader's "
            "collate_fn returns, is of no kind that can be empty.",
            parameter="collate_fn",
            remedy="Return tensors, lists, tuples or dicts from it.",
        )

    def __reduce__(self) -> Any:  # worker processes need the loader's own
        return CountingCollate, (self.collate, self.dataset, None, None, self.key)


def _has_ones(batch: Any) -> bool:
    """Returns True if a batch of several records has a tensor ``[1, ...]``."""
    tensors = (x for x in tree_leaves(batch) if isinstance(x, torch.Tensor))
    return any(x.dim() and x.shape[0] == 1 for x in tensors)


_VALUES = str, bytes, bool, int, float, complex, np.generic


def _blank(value: Any) -> Any:
    """
    Returns an empty value of the same type, which reveals nothing; None for an object.
    """
    kinds: Any = (type(value),) if isinstance(value, np.generic) else _VALUES
    return next((kind() for kind in kinds if isinstance(value, kind)), None)


def _fields_of(dataset: Any) -> Set[Any]:
    """Returns the keys of a record."""
    if isinstance(dataset, IterableDataset) or not len(dataset):
        return set()
    with seeded(0):  # random numbers of the run stay as they are
        record = dataset[0]
    return {*record} if isinstance(record, Mapping) else set()


def watch_loader(
    loader: DataLoader, optimizer: Any, inputs: InputReader, passes: Passes
) -> None:
    """
    Makes a loader report what it draws. When it begins a new epoch, a logical batch
    that was left in the middle is dropped.

    Args:
        loader: as make_private returns it; it is changed
        optimizer: the DP optimizer
        inputs: the private model's reader of inputs
        passes: the private model's backward passes
    """
    batches: Any = loader.batch_sampler
    drawn_by = getattr(batches, "sampling", None)
    # A record's draws by others than Poisson sampling depend on each other.
    allocates = getattr(drawn_by, "allocates", False) or hasattr(drawn_by, "separation")
    counter = DrawCounter(optimizer, _rate_of(batches), allocates)
    optimizer.draws = passes.counter = counter
    given = loader.collate_fn, loader.dataset, inputs, counter, inputs.mixing.key
    loader.collate_fn = CountingCollate(*given)
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    optimizer.ahead = optimizer.ahead_of_workers = ahead
    own, reader = weakref.ref(optimizer), weakref.ref(inputs)
    shared_out = _is_shared_out(loader, batches)
    # Sizes of the batches that may be at hand, as workers and loops draw ahead.
    sizes: deque[int] = deque(maxlen=4 + optimizer.ahead)
    inputs.fields = functools.partial(_fields_of, loader.dataset)
    inputs.drawn = counter.sizes = deque(maxlen=4 + optimizer.ahead)

    def batches_of(self: Any, is_split: bool) -> Iterator[List[int]]:
        dp_optimizer: Any = own()
        inputs = reader()
        several = hasattr(dp_optimizer, "drawn") and dp_optimizer.world_size > 1
        if several and not shared_out:
            raise Refused(
                "poisson_sampling=False, and the loader of each process may go through "
                "the whole data set: a record may be in the batches of two processes, "
                "and count twice in one step. If Accelerate has prepared the loader "
                "since make_private, a step has more records than are accounted for.",
                parameter="data_loader",
                remedy="Leave poisson_sampling out; or give the DataLoader a "
                "torch.utils.data.DistributedSampler (with num_replicas=1 and rank=0 "
                "if the data set has other records in each process), or call "
                "accelerator.prepare before make_private.",
            )
        if hasattr(dp_optimizer, "drop_logical_batch"):  # not one of Opacus's own
            dp_optimizer.drop_logical_batch()
        largest, state = 0, _state_of_draws(self, 0)
        for number, batch in enumerate(batches, 1):
            counter.draw(len(batch), state, _rate_of(self))
            sizes.append(len(batch))
            if ahead and not is_split:  # its records are collated elsewhere
                counter.sizes.append(len(batch))
            largest = max(largest, len(batch))
            if inputs is not None:
                inputs.most = max(sizes)
            yield batch
            state = _state_of_draws(self, number)
        if inputs is not None:
            inputs.most = largest  # a loop may go through a list of all batches

    def begin(self: Any) -> Iterator[List[int]]:
        # Splits ask for a batch, and not for each of its parts.
        is_split = vars(self).pop("is_split", False)
        counter.begin(0 if is_split else ahead, getattr(batches, "ahead", 0))
        return Counted(batches_of(self, is_split), own(), counter)

    # The sampler before lives on in it, as a ledger may know it.
    vars(loader)["batch_sampler"] = StandIn(batches, begin)


def _rate_of(sampler: Any) -> Optional[float]:
    """Returns the probability with which a sampler draws a record now, if it has one"""
    if hasattr(sampler, "sampling"):
        return sampler.sampling.rate(sampler.num_samples)
    return getattr(sampler, "sample_rate", None)


def _state_of_draws(sampler: Any, number: int) -> Optional[int]:
    """
    Returns a hash of the state that a batch of an epoch is drawn from, given its
    number. None if there is none, or batches are to come back.
    """
    if not isinstance(sampler, UniformWithReplacementSampler):
        return None
    sampling = getattr(sampler, "sampling", None)
    comes_back = sampling is not None and sampling.keeps_allocation
    if getattr(sampler, "place", None) or comes_back:
        return None
    state = state_of(sampler.generator)
    if state is None or sampling is None or not sampling.allocates:
        return state
    return hash((state, number))  # the state of all batches of an epoch but the first


def _is_shared_out(loader: DataLoader, batches: Any) -> bool:
    """Returns True for the loaders that are known to give each process its share."""
    own = getattr(batches, "sampler", None)
    ours = isinstance(batches, (Draws, DistributedUniformWithReplacementSampler))
    theirs = type(loader).__module__.startswith("accelerate.")
    return ours or theirs or isinstance(own, DistributedSampler)


# -- the steps -------------------------------------------------------------------------


class LoopMonitor:
    """
    Warns of loops that would void the guarantee. It uses only numbers that the DP
    optimizer has anyway.

    Args:
        engine: the engine that has made the model private
        module: the model
        records: number of records in the data set
        rate: probability of Poisson sampling; None for other samplings
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        module: nn.Module,
        records: int,
        rate: Optional[float],
    ):
        self.module = weakref.ref(module)
        # A copy of an engine shares its ledger.
        self._ledger = weakref.ref(ledger_of(engine))
        self.records = records
        self.rate = rate if rate is not None and 0 < rate < 1 else None
        self.stepping = False  # True while the DP optimizer takes its step

    def is_of_another(self, engine: PrivacyEngine) -> bool:
        """Returns True if the model was made private by another engine."""
        return self._ledger() not in (None, ledger_of(engine))

    @property
    def active(self) -> bool:
        """True while the model is private."""
        return hasattr(self.module(), "autograd_grad_sample_hooks")

    def check_step(self, optimizer: Any, norms: List[Optional[torch.Tensor]]) -> None:
        """Checks a logical batch, given the norms of its samples."""
        module = self.module()
        if module is not None and not module.training:
            warn_once(
                optimizer,
                "eval",
                "A step is taken while the model is in evaluation mode: gradients are "
                "private, but dropout and the like are off. Call model.train() before "
                "the steps, and again after each evaluation.",
            )
        size = sum(len(n) for n in norms if n is not None)
        if self.rate is not None:
            drawn = min(self.rate * optimizer.accumulated_iterations, 1.0)
            self._check_views(optimizer, size, drawn)

    def _check_views(self, optimizer: Any, size: int, rate: float) -> None:
        """Warns if there are more samples than can have been drawn."""
        usual = self.records * rate
        surely = _log_binomial(self.records, rate, size) < math.log(1e-15)
        if size > usual and surely:
            self.rate = None
            note_broken(
                optimizer,
                "views",
                f"A step had {size} samples, but the loader draws {usual:.0f} records "
                "on average. If one record makes several samples, each of them is "
                "clipped alone, and epsilon does not hold. Make them one sample by "
                "opacus_ext.losses.RecordModel.",
            )


def _log_binomial(n: int, p: float, k: int) -> float:
    if not 0 <= k <= n or p >= 1:
        return 0.0 if k == n else -math.inf
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


#: By the optimizer that a DP optimizer wraps.
LOOPS: weakref.WeakKeyDictionary[Any, LoopMonitor] = weakref.WeakKeyDictionary()


def watch_steps(engine: PrivacyEngine, module: nn.Module, made: Sequence[Any]) -> None:
    """
    Checks the steps of the loop that trains what ``make_private`` has returned, and
    refuses those of the optimizer that it was given.
    """
    optimizer, loader = made[1], made[-1]
    if not isinstance(optimizer, ClippingOptimizer):
        return  # one of Opacus's own
    module = getattr(module, "_module", module)  # it was wrapped before
    batches: Any = getattr(loader, "batch_sampler", None)
    poisson = isinstance(batches, UniformWithReplacementSampler)
    drawn = poisson and not hasattr(batches, "sampling")
    rate = batches.sample_rate if drawn else None
    optimizer.loop = LoopMonitor(engine, module, len(loader.dataset), rate)
    original = plain(optimizer.original_optimizer)
    if not hasattr(original, "_optimizer_step_pre_hooks"):
        return
    if original not in LOOPS:
        original.register_step_pre_hook(_refuse_step)
    LOOPS[original] = optimizer.loop
    if original is not optimizer.original_optimizer:
        # Accelerate saves and loads the state of this one, which has no noise.
        own = weakref.ref(optimizer)
        original.register_load_state_dict_pre_hook(lambda *_: _begin_noise(own()))


def _begin_noise(optimizer: Any) -> None:
    """
    Draws new noise, as a run must that goes on from a state without that of the noise.
    """
    if optimizer is None:
        return
    if optimizer.correlated is not None:
        raise Refused(
            "The state that Accelerate loads has no correlated noise.",
            parameter="noise",
            remedy="Save by engine.save_checkpoint (with fully_shard each process to a "
            "file of its own), or call accelerator.prepare with the optimizer of "
            "make_private.",
        )
    optimizer.mix_noise()
    if optimizer.ledger is not None:
        optimizer.ledger.draw_afresh()


def plain(optimizer: Any) -> Any:
    """
    Returns the optimizer inside of one that Accelerate has prepared, or the same one.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if not isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            break
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    loop = LOOPS.get(optimizer)
    if loop is not None and loop.active and not loop.stepping:
        raise Refused(
            f"{type(optimizer).__name__}.step() of the optimizer that was passed to "
            "make_private: its gradients are not private.",
            parameter="optimizer",
            remedy="Call step() of the optimizer that make_private has returned; to "
            "train without privacy make another optimizer.",
        )
