"""The body of a user's loop, which must give each record a gradient of its own."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Mapping, Optional, Set

import numpy as np
import torch
from torch import nn

from opacus_ext.checks.report import PerSampleGradientReport
from opacus_ext.checks.subject import T, largest, map_tensors, rows_of, tensors_of
from opacus_ext.data.logical import seeded
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

Step = Callable[[Any], Any]

_RECORDS = 16  # of the batch that are used
_TRIALS = 12  # as a loop may mix records in some steps only
_RANDOM = (
    "step(batch) gives other gradients when it runs again: it keeps something (a "
    "counter, an average), or has a random generator of its own. Make that anew in "
    "step(batch) to compare"
)
_DRAWS = (
    "step(batch) draws more random numbers for some records than for others, so that "
    "batches can't be compared: draw as many for each record, such as "
    "torch.rand_like(inputs), and choose from them"
)
_REMEDY = (
    "step: change each record by itself, in __getitem__ of the data set, and call "
    "backward() on the mean (or sum) of one loss for each record, which no other "
    "record enters."
)


class StepCheck:
    """
    Compares batches of one size that share a record. A sum, or mean, over records has
    another record in the place of one change by the same, whatever the others are.

    Args:
        model: that the step trains
        batch: of records; with ``collate_fn`` a list of records of the data set
        step: computes the loss of a batch, and calls ``backward()``
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        step: Step,
        collate_fn: Optional[Callable[[List], Any]] = None,
    ):
        self._model, self._step = model, step
        self._batch, self._collate = batch, collate_fn
        self._drawn: Set[int] = set()  # states of the generators after a step
        self._dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        if collate_fn is not None:
            self._size = len(batch)
        else:
            tensors = tensors_of(batch)
            self._size = len(tensors[0]) if tensors else 0
        if self._size < 4:
            raise Refused(
                f"A step is tried on four records or more, got {self._size}.",
                parameter="batch",
                remedy="Pass a larger batch, of real data.",
            )

    def report(
        self, report: PerSampleGradientReport, tolerances: Mapping[torch.dtype, float]
    ) -> None:
        """
        Adds to a report what is wrong with the step.

        Args:
            tolerances: share of the largest entry that rounding changes, by dtype
        """
        rows = np.linspace(0, self._size - 1, min(self._size, _RECORDS)).astype(int)
        half = len(rows) // 2
        first = self._gradients(rows[:half], seed=0)
        # The step may have entered autocast.
        tolerance = max(10 * tolerances.get(dtype, 5e-3) for dtype in self._dtypes)
        if _difference(first, self._gradients(rows[:half], seed=0)) > tolerance:
            report.random = True
            report.findings.append(_RANDOM)
            return
        for trial in progress(range(_TRIALS), "trying the step"):
            rows = np.random.default_rng(trial).permutation(rows)
            self._drawn.clear()
            change = self._interaction(rows[:half], rows[-half:], trial)
            if change > tolerance and len(self._drawn) > 1:
                report.random = True
                report.findings.append(_DRAWS)
                return
            if change > tolerance:
                report.findings.append(
                    "what a record adds to the gradient of step(batch) changes with "
                    f"the other records, by {change:.1%} of the largest entry (mixup, "
                    "cutmix, a statistic of the batch, in-batch negatives, weights or "
                    "tokens counted in the batch?): no per-sample clipping is valid"
                )
                report.leaks.append(_REMEDY)
                return

    def _interaction(self, these: np.ndarray, those: np.ndarray, seed: int) -> float:
        """
        Returns by how much one record in the place of another changes the gradient
        differently beside ``these`` and beside ``those``, as a share of the gradient.
        """
        place = seed % len(these)
        sums = []
        for others in (these, those):
            for record in (these[place], those[place]):
                chosen = others.copy()
                chosen[place] = record
                sums.append(self._gradients(chosen, seed))
        one, other, beside, other_beside = sums
        changes = [a - b for a, b in zip(one, other)]
        changes_beside = [a - b for a, b in zip(beside, other_beside)]
        scale = max(largest(grad) for grads in sums for grad in grads)
        error = max(largest(a - b) for a, b in zip(changes, changes_beside))
        return error / max(scale, 1e-12)

    def _gradients(self, rows: np.ndarray, seed: int) -> List[T]:
        """Returns the gradients that the step leaves, from the same random numbers."""
        if self._collate is not None:
            records = [self._batch[row] for row in rows]
        else:
            chosen = rows_of(self._batch, rows.tolist(), self._size)
            batch = map_tensors(lambda tensor: tensor.detach().clone(), chosen)
        params = [p for p in self._model.parameters() if p.requires_grad]
        with _restored(self._model) as before, _seeded(seed):
            if self._collate is not None:
                batch = self._collate(records)
            with self._watched():
                self._step(batch)
            self._drawn.add(_states())
            grads = [p.grad for p in params]
            if any(not torch.equal(p, old) for p, old in zip(params, before)):
                raise Refused(
                    "step(batch) has changed the weights.",
                    parameter="step",
                    remedy="End it with backward(), without optimizer.step().",
                )
        if all(grad is None for grad in grads):
            raise Refused(
                "step(batch) has left no gradient on the parameters of the model.",
                parameter="step",
                remedy="Let it use this model, and end with backward().",
            )
        whole = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads)]
        if not all(grad.isfinite().all() for grad in whole):
            raise Refused(
                "step(batch) gives gradients that are not finite.",
                parameter="step",
                remedy="Try it with a batch of which all losses are finite.",
            )
        return whole

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within it, dtypes that the model computes in by autocast are noted."""

        def note(module: nn.Module, inputs: Any) -> None:
            for kind in {p.device.type for p in self._model.parameters()}:
                if torch.is_autocast_enabled(kind):
                    self._dtypes.add(torch.get_autocast_dtype(kind))

        hooks = [x.register_forward_pre_hook(note) for x in self._model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _states() -> int:
    """Returns a number that tells how far random numbers have been drawn."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    drawn = [state.numpy().tobytes() for state in states]
    return hash((*drawn, random.getstate(), str(np.random.get_state())))


def _difference(these: List[T], others: List[T]) -> float:
    scale = max([1e-12, *map(largest, these)])
    return max(largest(a - b) for a, b in zip(these, others)) / scale


@contextmanager
def _restored(model: nn.Module) -> Iterator[List[T]]:
    """Restores parameters, their gradients and buffers; gives what is trained."""
    params, buffers = list(model.parameters()), list(model.buffers())
    values = [tensor.detach().clone() for tensor in (*params, *buffers)]
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield [x for x, p in zip(values, params) if p.requires_grad]
    finally:
        with torch.no_grad():
            for tensor, value in zip((*params, *buffers), values):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for p, grad in zip(params, grads):
            p.grad = grad


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within it, the random numbers of all devices come from ``seed``."""
    devices: List[int] = []
    if torch.cuda.is_initialized():
        devices = [*range(torch.cuda.device_count())]
    with torch.random.fork_rng(devices), seeded(seed):
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
