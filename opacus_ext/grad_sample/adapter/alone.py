"""A sample that runs alone, by ordinary autograd, and what in it is made of data.

Also, for all ways of running: recurrent states, whose samples are in dim 1, and leaves
that the code makes.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, Set

import torch
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.adapter.state import memory
from opacus_ext.grad_sample.core import branches
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import HANDLERS
from opacus_ext.grad_sample.rules.recurrent import MODES

T = torch.Tensor
# Of a group's ways to handle functions, those that ask for a number.
_ASKING = {
    *(branches.ask, branches.ask_all, branches.ask_rest, branches.where),
    *(branches.getitem, branches.setitem, branches.equal, branches.allclose),
    *(branches.contains, branches.backward_inside),
}
_SET_DATA = getattr(T.data, "__set__")
_KEEP = {T.detach, T.clone, T.contiguous, torch.clone}


class Known:
    """Tensors known by identity, as long as they live."""

    def __init__(self) -> None:
        self._refs: Dict[int, weakref.ref] = {}

    def add(self, x: T) -> None:
        """From now on it is known."""
        self._refs[id(x)] = weakref.ref(x)

    def __contains__(self, x: Any) -> bool:
        found = self._refs.get(id(x))
        return found is not None and found() is x


class Notes:
    """
    What is noted of a run, of several samples or of one.

    Attributes:
        states: recurrent states, whose samples are in dim 1
        leaves: that the code has made, with a gradient of their own
        written: where memory begins that was written to
    """

    def __init__(self) -> None:
        self.states, self.leaves = Known(), Known()
        self.written: Set[int] = set()

    def take(self, func: Callable, args: tuple, found: Any) -> None:
        """Called with each function, its arguments and what it gave."""
        if (
            args
            and isinstance(args[0], T)
            and _writes(func)
            and not is_batched(args[0])
        ):
            self.written.add(memory(args[0]))
        if isinstance(found, T):
            if found.requires_grad and found.is_leaf:
                self.leaves.add(found)
            if func in _KEEP and args[0] in self.states:
                self.states.add(found)
        elif func in MODES and isinstance(found, tuple):
            for x in found[1:]:
                if isinstance(x, T) and x.dim() == 3:
                    self.states.add(x)


class AloneSample(TorchFunctionMode):
    """
    Follows what is made of a sample's data: all but what is known not to be.

    Args:
        public: tensors that are not, by id

    Attributes:
        told_data: whether the code was told a number of the data
        written: memory, not of data before, that data went to
        notes: of the run
    """

    def __init__(self, public: Dict[int, T]):
        super().__init__()
        self.told_data, self.notes = False, Notes()
        self._public, self._made = public, Known()
        self.written: Set[int] = set()

    def is_data(self, x: T) -> bool:
        """Whether a tensor is made of the sample's data."""
        known = self._public.get(id(x)) is x or x in self._made
        return not known or bool(self.written) and memory(x) in self.written

    def agree(self, x: T) -> T:
        """The code asks for the value of a tensor."""
        self.told_data = self.told_data or isinstance(x, T) and self.is_data(x)
        return x

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """A function, with what it tells."""
        into = [x for x in _tensors((*args, *kwargs.values())) if not self.is_data(x)]
        versions = [x._version for x in into]
        found = func(*args, **kwargs)
        if any(map(self.is_data, _tensors((*args, *kwargs.values())))):
            pairs = zip(into, versions)
            self.written |= {memory(x) for x, n in pairs if x._version != n}
        else:
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, T):
                    self._made.add(x)
        return found

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler in _ASKING:
            found = handler(self, func, *args, **(kwargs or {}))
        else:
            found = self.call(func, *args, **(kwargs or {}))
        self.notes.take(func, args, found)
        return found


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name[-1:] == "_" and name[-2:] != "__" and name != "requires_grad_"
    # Other memory is seen by its place, and ``p.data = p.data.to(...)`` has the same.
    is_set = name == "__set__" and func != _SET_DATA
    return in_place or name == "__setitem__" or is_set


def _tensors(values: Iterable) -> Iterator[T]:
    for x in values:
        if isinstance(x, T):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
