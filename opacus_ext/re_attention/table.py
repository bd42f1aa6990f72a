"""Notes on tensors, in tables instead of attributes on them."""

from __future__ import annotations

import weakref
from typing import Dict, List, Optional, Tuple, Union

from torch import Tensor

from opacus_ext.grad_sample.core.vmap import whole
from opacus_ext.re_attention.variances import Lost, Variance


class Note:
    """
    The note on one tensor.

    Attributes:
        variance: of its error; None if it has none
        weights_only: True for a vector made of nothing but parameters
        view: True for a view that an operation has made
    """

    __slots__ = ("variance", "weights_only", "view")

    def __init__(self) -> None:
        self.variance: Union[None, Variance, Lost] = None
        self.weights_only = False
        self.view = False


class Table:
    """
    Notes on tensors. A note lives as long as its tensor, which it does not keep alive.

    ``torch.utils.weak.WeakTensorKeyDictionary`` is the same thing and takes 15 to 30
    times as long for a look-up, of which an operation makes several.
    """

    def __init__(self) -> None:
        self._notes: Dict[int, Tuple["weakref.ref[Tensor]", Note]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def get(self, x: Tensor) -> Optional[Note]:
        """The note on a tensor, if there is one."""
        entry = self._notes.get(id(x))
        return None if entry is None else entry[1]

    def note(self, x: Tensor) -> Note:
        """The note on a tensor, a new one if there is none."""
        found = self.get(x)
        if found is None:
            found, key, notes = Note(), id(x), self._notes
            notes[key] = weakref.ref(x, lambda _: notes.pop(key, None)), found
        return found

    def discard(self, x: Tensor) -> None:
        """Forgets a tensor."""
        self._notes.pop(id(x), None)

    def variance(self, x: Tensor) -> Union[None, Variance, Lost]:
        """Looks up a tensor's variance; None for one without error."""
        found = self.get(x)
        return None if found is None else found.variance

    def set(self, x: Tensor, variance: Union[None, Variance, Lost]) -> None:
        """Says what the variance of a tensor is."""
        if variance is not None or self.get(x) is not None:
            self.note(x).variance = variance

    def sharing(self, x: Tensor) -> List[Tensor]:
        """Other tensors with notes that lie in the memory of ``x``."""
        found: List[Tensor] = []
        memory = memory_of(x)
        for ref, _ in list(self._notes.values()) if memory else ():
            y = ref()
            if y is None or y is x:
                continue
            y._fix_weakref()  # autograd may be the only one that has it
            if memory_of(y) == memory:
                found.append(y)
        return found


def memory_of(x: Tensor) -> Optional[int]:
    """The address of a tensor's memory; None if it can't be had, as of sparse ones."""
    try:
        return whole(x).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
