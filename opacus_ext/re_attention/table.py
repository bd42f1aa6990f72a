"""Notes on tensors, in tables instead of attributes on them."""

from __future__ import annotations

import weakref
from typing import Dict, Optional, Tuple, Union

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from opacus_ext.grad_sample.core.vmap import whole
from opacus_ext.re_attention.variances import Lost, Variance


class Note:
    """
    The note on one tensor.

    Attributes:
        variance: of its error; None if it has none
        weights_only: True for a vector made of nothing but parameters
        writes: how often its memory had been written to, when the note was made
    """

    __slots__ = ("variance", "weights_only", "writes")

    def __init__(self) -> None:
        self.variance: Union[None, Variance, Lost] = None
        self.weights_only = False
        self.writes = 0


class Table:
    """
    Notes on tensors. A note lives as long as its tensor, which it does not keep alive.

    ``torch.utils.weak.WeakTensorKeyDictionary`` is the same thing and takes 15 to 30
    times as long for a look-up, of which an operation makes several.
    """

    def __init__(self) -> None:
        self._notes: Dict[int, Tuple["weakref.ref[Tensor]", Note]] = {}
        # Memory that errors were written to: how often, and by what. The weak reference
        # keeps the address from being used again.
        self._written: Dict[int, Tuple[StorageWeakRef, int, str]] = {}

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

    def forget_memory(self) -> None:
        """Forgets memory that is gone."""
        gone = [at for at, (ref, _, _) in self._written.items() if ref.expired()]
        for at in gone:
            del self._written[at]

    def variance(self, x: Tensor) -> Union[None, Variance, Lost]:
        """
        Looks up a tensor's variance; None for one without error. It is lost where the
        memory was written to through another tensor.
        """
        found = self.get(x)
        if self._written and (memory := _memory(x)) in self._written:
            _, writes, operation = self._written[memory]
            if found is None or found.writes != writes:
                return Lost(operation)
        return None if found is None else found.variance

    def set(self, x: Tensor, variance: Union[None, Variance, Lost]) -> None:
        """Says what the variance of a tensor is."""
        if variance is None and self.get(x) is None:
            return
        note = self.note(x)
        note.variance, note.writes = variance, 0
        if self._written and (memory := _memory(x)) in self._written:
            note.writes = self._written[memory][1]

    def write(
        self, x: Tensor, variance: Union[None, Variance, Lost], operation: str
    ) -> None:
        """The same where an operation has changed ``x`` in place."""
        note, memory = self.note(x), _memory(x)
        if memory is None:
            note.variance = Lost(operation)
            return
        ref, writes, _ = self._written.get(memory, (None, 0, ""))
        ref = StorageWeakRef(whole(x).untyped_storage()) if ref is None else ref
        note.variance, note.writes = variance, writes + 1
        self._written[memory] = ref, writes + 1, operation


def _memory(x: Tensor) -> Optional[int]:
    """What tensors of the same memory share; None if there is none, as of sparse."""
    try:
        return whole(x).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
