"""The records to which the gradients of a step belong.

What was drawn once is clipped once. So each backward pass is known by the draw that its
inputs came from, as far as it can be told: by the tensors that the loader gave, by how
many batches the loop has taken, by the inputs themselves.
"""

from __future__ import annotations

import math
from typing import Any, Iterable, NamedTuple, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.grad_sample.core.values import have_same_bits
from opacus_ext.private_torch import tree_leaves
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


# The draws of tensors that loaders gave. Weak keys free what a loop has left.
_draws = WeakIdKeyDictionary()


def mark(batch: Any, draw: Draw) -> None:
    """Notes that the tensors of a batch are of a draw."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, T):
            _draws[leaf] = draw


def draw_of(tensor: T) -> Draw | None:
    """Returns the draw that a tensor is of, if it is one that the loader gave."""
    return _draws.get(tensor)


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
        """Returns True if both have the same inputs, in memory or by their bits."""
        if len(self.inputs) != len(other.inputs) or not self.inputs:
            return False
        # What was changed since does not tell what it was.
        for tensor, version in (*self.inputs, *other.inputs):
            if tensor._version != version:
                return False
        both = zip(self.inputs, other.inputs)
        pairs = [(tensor, theirs) for (tensor, _), (theirs, _) in both]
        if all(_are_one(*pair) for pair in pairs):
            return True
        # Two records may be equal by chance; several in a row are copies.
        return self.size > 1 and all(have_same_bits(*pair) for pair in pairs)


def second_pass(others: str) -> Refused:
    """Makes the error for two passes before a step; ``others`` is said of batches."""
    return Refused(
        "backward() a second time before optimizer.step() and zero_grad(), over "
        "records that were drawn once: each pass is clipped by itself, so that a "
        "record would count twice.",
        remedy="Add the losses, those of a GAN's fakes too, and call backward() on "
        f"their sum, (loss_real + loss_fake).backward(). {others}",
    )


def _are_one(tensor: T, other: T) -> bool:
    """Returns True for tensors at the same place in memory."""
    form = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return form == (other.data_ptr(), other.shape, other.stride(), other.dtype)


class Passes:
    """
    The backward passes whose gradients the next step takes.

    Attributes:
        counter: of the loader of make_private; None if there is none
        ended: number of logical batches that are over, by a step or without
    """

    def __init__(self) -> None:
        self.counter: Counter | None = None
        self.ended = 0
        # The passes of the gradients that are in the parameters now.
        self._new: list[Pass] = []
        # The passes of sums that the physical batches before have left.
        self._kept: list[Pass] = []

    @property
    def taken(self) -> int:
        """Returns how many batches the loop has taken from the loader."""
        return 0 if self.counter is None else self.counter.taken

    def add(self, records: Iterable[Any]) -> None:
        """Adds a pass through forward records; refuses records of an earlier one."""
        # A loss may depend on several forward passes.
        size = taken = 0
        tensors = []
        doubt = None
        for record in records:
            size = max(size, record.size)
            taken = max(taken, record.taken)
            leaves = tree_leaves(record.inputs.given)
            tensors += [leaf for leaf in leaves if isinstance(leaf, T)]
            doubt = doubt or record.inputs.doubt
        if not size:
            return
        drawn = None
        if self.counter is not None:
            drawn = self.counter.size_of(taken)
        draws = {*map(_draws.get, tensors)} - {None}
        inputs = []
        # Inputs are compared only if neither their draw nor its number is known.
        if drawn is None and not draws:
            for tensor in tensors:
                if tensor.numel() and not tensor.is_inference():
                    inputs.append((tensor.detach(), tensor._version))
        latest = Pass(size, frozenset(draws), taken, tuple(inputs), doubt)
        if latest.may_enter and self._comes_again(latest, drawn):
            raise second_pass(
                "Batches of other draws can be accumulated: take each from the loader "
                "after the backward() of the one before."
            )
        self._new.append(latest)

    def _comes_again(self, latest: Pass, drawn: int | None) -> bool:
        """
        Returns True if an earlier pass has records of the latest one. Without their
        draws, passes tell by having more samples than the batch that was taken.
        """
        same = 0
        for earlier in (*self._kept, *self._new):
            if not earlier.may_enter:
                continue
            if latest.draws & earlier.draws or latest.has_inputs_of(earlier):
                return True
            if earlier.taken == latest.taken and not (earlier.draws and latest.draws):
                same += earlier.size
        return drawn is not None and same > 0 and same + latest.size > drawn

    def check(self) -> None:
        """
        Called before a step.

        Raises:
            Refused: if a pass is in doubt, and the step has not as many other samples
                as were drawn
        """
        certain = 0
        doubts = []
        for backward_pass in (*self._kept, *self._new):
            if backward_pass.doubt is not None:
                doubts.append(backward_pass.doubt)
            if backward_pass.doubt is None or backward_pass.doubt.counts:
                certain += backward_pass.size
        # If the other samples are as many as were drawn, those in doubt are no records.
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
            self.ended += 1

    def draws(self) -> frozenset[Draw]:
        """Returns the draws to which the gradients of a step are known to belong."""
        passes = (*self._kept, *self._new)
        return frozenset().union(*[backward_pass.draws for backward_pass in passes])
