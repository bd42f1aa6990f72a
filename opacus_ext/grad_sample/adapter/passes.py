"""The records that the gradients of a step are of.

What was drawn once is clipped once. So each backward pass is known by the draw that its
inputs came from, as far as it can be told: by the tensors that the loader gave, by how
many batches the loop has taken, by the inputs themselves.
"""

from __future__ import annotations

import math
from typing import Any, Iterable, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.grad_sample.core.values import have_same_bits
from opacus_ext.refused import Refused

T = torch.Tensor


class Counter(Protocol):
    """Counts the batches that a loop takes from a loader."""

    @property
    def taken(self) -> int:
        """Returns how many batches the loop has taken so far."""

    def size_of(self, taken: int) -> int | None:
        """Returns the number of records of the last of so many batches, if known."""


class Draw(NamedTuple):
    """
    A batch: the loader's counter, the number of its draw, and of it or its part, with
    the number of records in this.
    """

    counter: Counter
    number: int
    part: int
    size: int


class Doubt(NamedTuple):
    """
    Why gradients may not enter a step: they seem to be of records that were ``drawn``,
    and of another number of samples. If they ``counts``, these samples may be parts of
    what was drawn; others are known to be something else if the step has other samples.
    Without ``drawn`` no other samples help.
    """

    error: Refused
    drawn: float = math.inf
    counts: bool = False


_draws = WeakIdKeyDictionary()  # by tensor


def mark(batch: Any, draw: Draw) -> None:
    """Notes that the tensors of a batch are of a draw."""
    for x in tree_leaves(batch):
        if isinstance(x, T):
            _draws[x] = draw


def draw_of(x: T) -> Draw | None:
    """Returns the draw that a tensor is of, if it is one that the loader gave."""
    return _draws.get(x)


class Pass(NamedTuple):
    """
    One backward pass.

    Attributes:
        size: number of samples
        draws: of which its inputs are known to be
        taken: number of batches that the loop had taken from the model's loader
        inputs: tensors with their versions, if nothing else tells of their draw
        doubt: why they may not enter a step
    """

    size: int
    draws: frozenset[Draw]
    taken: int
    inputs: tuple[tuple[T, int], ...]
    doubt: Doubt | None = None

    @property
    def may_enter(self) -> bool:
        """Returns False if no step can have its gradients."""
        return self.doubt is None or self.doubt.drawn < math.inf

    def has_inputs_of(self, other: Pass) -> bool:
        """Returns True if both have the same inputs, of one place or of equal bits."""
        if len(self.inputs) != len(other.inputs) or not self.inputs:
            return False
        if any(x._version != v for x, v in (*self.inputs, *other.inputs)):
            return False  # they were changed since
        pairs = [(x, y) for (x, _), (y, _) in zip(self.inputs, other.inputs)]
        if all(_are_one(x, y) for x, y in pairs):
            return True
        # Two records may be equal by chance; several in a row are copies.
        return self.size > 1 and all(have_same_bits(x, y) for x, y in pairs)


def second_pass(others: str) -> Refused:
    """Makes the error for two passes before a step; ``others`` is said of batches."""
    return Refused(
        "backward() a second time before optimizer.step() and zero_grad(), over "
        "records that were drawn once: each pass is clipped by itself, so that a "
        "record would count twice.",
        remedy="Add the losses, those of a GAN's fakes too, and call backward() on "
        f"their sum, (loss_real + loss_fake).backward(). {others}",
    )


def _are_one(x: T, y: T) -> bool:
    """Returns True for tensors of one place in memory."""
    form = x.data_ptr(), x.shape, x.stride(), x.dtype
    return form == (y.data_ptr(), y.shape, y.stride(), y.dtype)


class Passes:
    """
    The backward passes whose gradients the next step takes.

    Attributes:
        counter: of the loader of make_private; None if there is none
    """

    def __init__(self) -> None:
        self.counter: Counter | None = None
        self._new: list[Pass] = []  # of the gradients of the parameters
        self._kept: list[Pass] = []  # of sums that physical batches have left

    @property
    def taken(self) -> int:
        """Returns how many batches the loop has taken from the loader."""
        return 0 if self.counter is None else self.counter.taken

    def add(self, records: Iterable[Any]) -> None:
        """Adds a pass through forward records; refuses records of an earlier one."""
        records = list(records)
        size = max((r.size for r in records), default=0)
        if not size:
            return
        taken = max(r.taken for r in records)
        drawn = self.counter.size_of(taken) if self.counter else None
        leaves = [x for r in records for x in tree_leaves(r.inputs.given)]
        tensors = [x for x in leaves if isinstance(x, T)]
        draws = frozenset(_draws[x] for x in tensors if x in _draws)
        known = drawn is not None or bool(draws)
        inputs = [
            (x.detach(), x._version)
            for x in tensors
            if not known and x.numel() and not x.is_inference()
        ]
        doubts = (r.inputs.doubt for r in records)
        doubt = next((x for x in doubts if x is not None), None)
        new = Pass(size, draws, taken, tuple(inputs), doubt)
        others = [x for x in (*self._kept, *self._new) if x.may_enter]
        again = any(new.draws & x.draws or new.has_inputs_of(x) for x in others)
        again = again or drawn is not None and self._are_too_many(new, others, drawn)
        if again and new.may_enter:
            raise second_pass(
                "Batches of other draws can be accumulated: take each from the loader "
                "after the backward() of the one before."
            )
        self._new.append(new)

    def _are_too_many(self, new: Pass, others: list[Pass], drawn: int) -> bool:
        """Returns True if passes have more samples than the batch that was taken."""
        unknown = (x for x in others if not (x.draws and new.draws))
        same = sum(x.size for x in unknown if x.taken == new.taken)
        return same > 0 and same + new.size > drawn

    def check(self) -> None:
        """
        Called before a step.

        Raises:
            Refused: if a pass is in doubt, and the step has not as many other samples
                as were drawn
        """
        passes = [*self._kept, *self._new]
        doubts = [x.doubt for x in passes if x.doubt is not None]
        certain = sum(x.size for x in passes if x.doubt is None or x.doubt.counts)
        for doubt in doubts:
            if certain < doubt.drawn:
                raise doubt.error

    def keep(self) -> None:
        """Called when gradients are added to the sum of a logical batch."""
        self._kept += self._new
        self._new = []

    def forget(self, kept: bool) -> None:
        """Called when gradients are dropped, with those of the sum if ``kept``."""
        self._new = []
        if kept:
            self._kept = []

    def draws(self) -> frozenset[Draw]:
        """Returns the draws that the gradients of a step are known to be of."""
        return frozenset().union(*(x.draws for x in (*self._kept, *self._new)))
