"""The draws of a loader, each of which one step may spend.

A step is accounted for as a step on records that were drawn for it. If a draw comes
back (``itertools.cycle``, a list of batches, a seed in the loop), sampling gains no
privacy, so that the step is counted as one on all records.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Collection, Deque, Dict, NamedTuple, Optional, Set

import torch

from opacus_ext.grad_sample.adapter.passes import Draw

_AGAIN = (
    "A step had no new draw of make_private's loader (itertools.cycle of it, a list "
    "of its batches, a seed in the loop, another loader)."
)
#: Why epsilon may not hold if no batch was taken from the loader.
NOT_TAKEN = (
    "A step is taken, but no batch from the loader that make_private has returned. If "
    "the loop goes over the loader that make_private was given, or over another one, "
    "epsilon does not hold: go over the returned one."
)
_OF_ANOTHER = (
    "A step was taken on records that were drawn with probability {theirs:g} each, and "
    "not {own:g}: by the loader of another make_private, or by a sampler that was "
    "changed since."
)
_NOT_OWN = (
    "A step was taken on records that another loader than that of its make_private has "
    "drawn."
)
_ALIKE = (
    "The sum of this run and another one of this process: both were seeded with the "
    "same number and drew the same records, so that their epsilons do not add up as "
    "those of independent runs. Seed once, before the first run."
)
_KEPT = 2**16  # draws of which the state of the generator is known


class Spent(NamedTuple):
    """
    How a step is accounted for that is not taken on a new draw of its loader: as so
    many steps at a rate. If the rate is None, it is counted as usual, but without a
    guarantee.
    """

    rate: Optional[float]
    reason: str
    steps: int = 1


class DrawCounter:
    """
    Counts the batches that a loop takes from a loader of make_private, and the steps.

    Args:
        optimizer: that steps on them
        rate: probability with which a record is drawn; None if it is not known, so that
            steps are accounted for as they are
        allocates: True if a record's draws depend on each other, so that steps on them
            are accounted for together: as those of an epoch that is drawn at once
    """

    def __init__(
        self, optimizer: Any, rate: Optional[float] = None, allocates: bool = False
    ):
        self.rate, self.allocates, self.steps = rate, allocates, 0
        self._optimizer = weakref.ref(optimizer)
        self._taken_before = 0  # batches taken in earlier iterations
        self._asked = self._drawn = self._ahead = 0  # in this iteration
        self._steps_before = self._unsure = 0
        #: Numbers of records of the batches, or parts, that the loop may be at.
        self.sizes: Deque[int] = deque(maxlen=4)
        self._draws = self._collated = 0  # in all
        self._last: Dict[int, _Batch] = {}  # the last batches, by their count
        self._batch = _Batch(0, 0)
        self._by_state: Dict[int, int] = {}  # numbers of draws
        self._spent: Set[Any] = set()  # loaders and numbers, known by tensors
        self._used: Set[int] = set()  # numbers of own draws, also by how many there are
        self._largest = 0.0  # rate of a draw so far
        self._states: Set[Any] = set()  # that they were drawn from
        self._is_over = False  # True once more steps than draws were counted
        _counters.add(self)

    # -- the loader --------------------------------------------------------------------

    def begin(self, ahead: int, most: int = 0) -> None:
        """
        Begins an iteration, of which ``ahead`` batches are asked for early, and up to
        ``most`` are drawn early.
        """
        self._taken_before, self._ahead = self.taken, ahead
        self._steps_before, self._unsure = self.steps, max(most - ahead, 0)
        self._asked = self._drawn = 0

    def ask(self) -> None:
        """Called when the loader asks for a batch, also after the last one."""
        self._asked += 1

    def draw(
        self, size: int, state: Optional[int] = None, rate: Optional[float] = None
    ) -> None:
        """
        Counts a draw of some records, given a hash of the generator's state, and the
        probability with which each was drawn.
        """
        self._largest = max(self._largest, rate or 0.0)
        self._draws += 1
        number = self._draws
        if state is not None:  # a state that comes back draws the same records
            number = self._by_state.setdefault(state, number)
            if len(self._by_state) > _KEPT:
                del self._by_state[next(iter(self._by_state))]
        self._batch = _Batch(number, size, state)
        if number not in self._used:
            self._drawn += 1
        count = self._taken_before + self._drawn
        self._last[count] = self._batch
        self._last.pop(count - 100 - self._ahead, None)

    def collate(self, size: int) -> Draw:
        """Returns the draw of which ``size`` records are collated now, or a part."""
        self._collated += 1
        return Draw(self, self._batch.number, self._collated, size)

    @property
    def taken(self) -> int:
        """Returns how many batches the loop has taken so far."""
        return self._taken_before + max(0, min(self._drawn, self._asked - self._ahead))

    @property
    def left(self) -> int:
        """
        Returns how many batches of this iteration, before the one that the loop is at,
        were left without a step for sure.
        """
        taken = self.taken - self._taken_before - self._unsure
        return max(taken - 1 - (self.steps - self._steps_before), 0)

    def size_of(self, taken: int) -> Optional[int]:
        """Returns the number of records of the last of so many batches, if known."""
        return self._last[taken].size if taken in self._last else None

    # -- the steps ---------------------------------------------------------------------

    def look(self, draws: Collection[Draw]) -> Optional[Spent]:
        """Returns how the next step is accounted for; None for one on a new draw."""
        if self.rate is None:
            return None
        if any(x[:2] in self._spent for x in draws):
            return Spent(1.0, _AGAIN)
        if self._is_own(draws) and self.steps >= self.taken:
            return self._again()
        others = {x.counter for x in draws} - {self}
        if others and self.allocates:
            return Spent(1.0, _NOT_OWN)
        rates = [
            1.0 if x.rate is None or x.allocates else x.rate  # type: ignore
            for x in others
        ]
        rate = max([self._largest, *rates])
        if rate <= self.rate * (1 + 1e-9):
            return None
        return Spent(rate, _OF_ANOTHER.format(theirs=rate, own=self.rate))

    def is_first_without(self, draws: Collection[Draw]) -> bool:
        """Returns True if a step is taken before any batch, which may be a try."""
        return self.rate is not None and self._is_own(draws) and not self.taken

    def _is_own(self, draws: Collection[Draw]) -> bool:
        """Returns False for a step on records that other loaders drew."""
        return not draws or any(x.counter is self for x in draws)

    def _again(self) -> Optional[Spent]:
        """
        Returns how a step is accounted for that has no draw, by their number. One step
        may be on records that the loop has made by itself; it is counted later.
        """
        if self.steps == self.taken:
            return None
        if not self.taken:
            return Spent(None, NOT_TAKEN)
        return Spent(1.0, _AGAIN, 1 if self._is_over else 2)

    def spend(self, draws: Collection[Draw]) -> Optional[str]:
        """Counts a step; returns what is wrong with its random numbers, if something"""
        self._spent |= {x[:2] for x in draws}
        if not self._is_own(draws):
            return None
        self._is_over = self.steps > self.taken
        self.steps += 1
        batch = self._last.get(self.taken)
        numbers = {x.number for x in draws if x.counter is self}
        if batch is not None and not draws:
            numbers = {batch.number}
        self._used |= numbers
        states = {x.state for x in self._last.values() if x.number in numbers} - {None}
        self._states |= states
        others = (
            x for x in _counters if x._optimizer() not in (None, self._optimizer())
        )
        return _ALIKE if any(states & x._states for x in others) else None


class _Batch(NamedTuple):
    number: int  # of its draw
    size: int
    state: Optional[int] = None  # a hash of the state that drew it


_counters: weakref.WeakSet[DrawCounter] = weakref.WeakSet()


def state_of(generator: Any) -> Optional[int]:
    """Returns a hash of the state that a generator draws from; None if it has none."""
    generator = torch.default_generator if generator is None else generator
    if not isinstance(generator, torch.Generator):
        return None  # the operating system's
    return hash(generator.get_state().numpy().tobytes())
