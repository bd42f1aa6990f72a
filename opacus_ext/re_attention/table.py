"""Notes on tensors, in tables instead of attributes on them."""

from __future__ import annotations

import weakref
from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from opacus_ext.grad_sample.core.vmap import is_batched, whole
from opacus_ext.re_attention.variances import Lost, Variance, squares


class Note:
    """
    The note on one tensor.

    Attributes:
        variance: of its error; None if it has none
        weights_only: whether it is a vector made of nothing but parameters
        view: True for a batched view that an operation has made
        squares: its sum of squares over the last dimension, and the version of the
            tensor for which it was computed
    """

    __slots__ = ("variance", "weights_only", "view", "squares")

    def __init__(self) -> None:
        self.variance: Union[None, Variance, Lost] = None
        self.weights_only = False
        self.view = False
        self.squares: Optional[Tuple[int, Tensor]] = None


class Table:
    """
    Notes on tensors. A note lives as long as its tensor, which it does not keep alive.

    ``torch.utils.weak.WeakTensorKeyDictionary`` is the same thing and takes 15 to 30
    times as long for a look-up, of which an operation makes several.

    Example:
        >>> table, x = Table(), torch.ones(2)
        >>> table.set(x, Variance(torch.tensor(0.1)))
        >>> table.variance(x).own
        tensor(0.1000)
        >>> del x
        >>> len(table)
        0
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
            found = Note()
            self._put(x, found)
        return found

    def _put(self, x: Tensor, note: Note) -> None:
        key, notes = id(x), self._notes
        notes[key] = weakref.ref(x, lambda _: notes.pop(key, None)), note

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

    def aliases(self, x: Tensor) -> List[Tensor]:
        """
        Other tensors with notes that are all of what ``x`` is a view of. A view's
        ``_base`` may be a tensor that nobody has seen: Linear makes of inputs ``[B, T,
        width]`` a product of matrices, and returns a view of it.
        """
        found = []
        memory, size = x.untyped_storage().data_ptr(), x._base.numel()
        for ref, _ in list(self._notes.values()):
            y = ref()
            if y is None or y is x:
                continue
            y._fix_weakref()  # autograd may be the only one that has it
            if is_batched(y) or y.layout != torch.strided or y.numel() != size:
                continue
            if y.untyped_storage().data_ptr() == memory and y is not x._base:
                found.append(y)
        return found

    def squares(self, x: Tensor) -> Tensor:
        """The sum of squares over the last dimension; kept, as several layers ask."""
        found = self.get(x)
        # What has no error is the user's, and inference tensors don't count versions.
        if found is None or found.variance is None or whole(x).is_inference():
            return squares(x)
        version = whole(x)._version
        if found.squares is None or found.squares[0] != version:
            found.squares = version, squares(x)
        return found.squares[1]
