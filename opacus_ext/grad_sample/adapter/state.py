"""The state of a model, which is compared after a forward and restored.

A forward that stores data on a module would carry it to a later forward without noise.
So a walk finds everything that modules hold, at any depth: tensors, and containers of
other objects. Each is compared, entry by entry, with its contents before. This file
also tracks which tensors of a forward are made of data.
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections import deque
from copy import deepcopy
from functools import partial
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opacus_ext.grad_sample.core.reads import Reads, tensors_in
from opacus_ext.grad_sample.core.values import are_same, have_same_bits
from opacus_ext.grad_sample.core.vmap import is_batched

T = torch.Tensor

# Attributes that are skipped: of torch's recurrent layers, Opacus, Lightning.
_AROUND = {"_flat_weights", "_flat_weight_refs", "_compiled_call_impl", "_trainer"}
_AROUND |= {"max_batch_len", "autograd_grad_sample_hooks", "_fabric"}
_AROUND.add("_non_persistent_buffers_set")
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name}
_PARTS = ("_parameters", "_buffers", "_modules")
#: Types of values that hold no other objects.
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
    *(torch.layout, torch.memory_format, np.generic),
)
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, deque),
    *(np.ndarray, bytearray, MappingProxyType),
)
# Attributes that a class sets but does not read in training: here the last state of a
# scan, for decoding. A class of the user names its own in ``transient``.
_TRANSIENT = {"RecurrentGemmaRglru": ("recurrent_states",)}  # of transformers
_QUICK = {int, float, bool, str, bytes, type(None)}  # the most frequent of PLAIN
_MANY = 10_000  # the most entries of a tensor that are compared
_GONE = object()


class Change(NamedTuple):
    """
    A change by a forward: a name and the new value. It is hidden if a kernel wrote to a
    tensor without a new version, as that of BatchNorm does.
    """

    name: str
    value: Any
    hidden: bool = False


class _Place(NamedTuple):
    """An object that may hold other objects later."""

    name: str
    value: Any
    named: bool | None  # True if its keys are attributes; None to ignore changes


class State:
    """Everything that the modules of a model, or another object, hold."""

    def __init__(self, root: Any):
        self.root = root
        self.lost: str | None = None  # the name of a value that was not restored
        self._memory: set[int] | None = None  # addresses of what is held
        self._others = TensorSet()
        self._collect()

    def __deepcopy__(self, memo: dict) -> State:
        memo[id(self)] = new = State(None)
        new.root = deepcopy(self.root, memo)
        new._stale = True  # walked later, when the copy is complete
        return new

    def _collect(self) -> None:
        """Collects all tensors and containers."""
        self.modules: list[nn.Module] = []
        self._tensors: dict[int, tuple[str, T]] = {}
        places: list[_Place] = []
        for name, x, named in _walk(self.root, True):
            if isinstance(x, T):
                self._tensors[id(x)] = name, x
            elif isinstance(x, nn.Module):
                self.modules.append(x)
                places.append(_Place(name, vars(x), True))
            elif named or _is_mutable(x):
                places.append(_Place(name, x, named))
        self._transient = []
        for m in self.modules:
            names = _TRANSIENT.get(type(m).__name__, ())
            self._transient.append((vars(m), getattr(m, "transient", names)))
        self._forget_transient()
        # They share memory with parameters, until these get other memory.
        self._first = {id(x): x.detach() for _, x in self._tensors.values()}
        self._before = [(place, dict(_entries(place.value))) for place in places]
        values = [place.value for place in places]
        self._empty = [x for x in values if isinstance(x, dict) and not x]
        self._full = [x for x in values if not isinstance(x, dict) or x]
        self._flat = _flat(self._full)
        # True if there are objects other than modules and tensors.
        self.has_objects = any(place.named is False for place in places)
        self._stale = False

    def holds(self, x: T) -> bool:
        """True if a tensor is held."""
        own = id(x) in self._tensors and self._tensors[id(x)][1] is x
        return own or x in self._others

    def watches(self, x: T) -> bool:
        """True if a tensor shares the memory of one that was held in the beginning."""
        if self._memory is None:
            self._memory = {memory(held) for _, held in self._tensors.values()}
        return memory(x) in self._memory

    def also_holds(self, tensors: Iterable[T]) -> None:
        """Counts tensors as held, of which the values are not compared."""
        for x in tensors:
            self._others.add(x)

    # -- before and after --------------------------------------------------------------

    def remember(self, parameters: bool = False) -> None:
        """
        Copies everything for a later comparison; parameters only with ``parameters``,
        for code whose ops are not followed.
        """
        self._forget_transient()
        if self._stale or self._replaced():
            self._collect()
        self._written: set[int] = set()
        self._memory = None
        self._kinds = [type(module) for module in self.modules]
        tensors = [x for _, x in self._tensors.values()]
        self._marks = [_mark(x) for x in tensors]
        views = (
            _view(x) if parameters or not isinstance(x, nn.Parameter) else None
            for x in tensors
        )
        self._copies = [None if view is None else view.clone() for view in views]

    def changes(
        self, written: Iterable[int] = (), compare: bool = True
    ) -> list[Change]:
        """
        Returns changes since :meth:`remember`; ``written`` are addresses of memory that
        was written. Without ``compare`` only tensors that seem to be written are
        compared: each comparison waits for the device.
        """
        self._forget_transient()
        self._written |= set(written)
        found = []
        for (name, _, named), now, old in self._replaced():
            for key in () if named is None else {**old, **now}:
                new = now.get(key, _GONE)
                if _equal(new, old.get(key, _GONE)) or named and _is_around(key):
                    continue
                change = (_join(name, key), new) if named else (name, (key, new))
                found.append(Change(*change))
        return found + [
            Change(name, x, h) for name, x, _, h in self._rewritten(compare)
        ]

    def restore(self) -> str | None:
        """Restores everything; returns the name of a value that it can't restore."""
        self._forget_transient()
        lost: str | None = None
        for (name, value, _), _, old in self._replaced():
            if not _put_back(value, old):
                lost = name
        for name, x, copy, _ in self._rewritten():
            if copy is None or copy.shape != x.shape:
                lost = name
            else:
                with torch.no_grad():
                    x.copy_(copy)
        for module, kind in zip(self.modules, self._kinds):
            if type(module) is not kind:
                module.__class__ = kind
        self._marks = [_mark(x) for _, x in self._tensors.values()]
        self.lost = self.lost or lost
        return lost

    def _forget_transient(self) -> None:
        for place, names in self._transient:
            place.update(dict.fromkeys(names))

    def _replaced(self) -> Iterable[tuple[_Place, Mapping, dict]]:
        """Returns containers that have changed, with their new and old entries."""
        if not any(self._empty):
            flat = _flat(self._full)
            if len(flat) == len(self._flat) and all(map(is_, flat, self._flat)):
                return []
        every = ((place, _entries(place.value), old) for place, old in self._before)
        return [each for each in every if not _same(*each[1:])]

    def _rewritten(
        self, compare: bool = True
    ) -> Iterator[tuple[str, T, T | None, bool]]:
        """Yields changed tensors: name, tensor, copy, and True if hidden."""
        every = zip(self._tensors.values(), self._marks, self._copies)
        for (name, x), mark, copy in every:
            new = _mark(x)
            noted = bool(self._written) and memory(x) in self._written
            # Adding and removing a parametrization sets a frozen parameter to itself.
            is_parameter, moved = isinstance(x, nn.Parameter), new[1] != mark[1]
            own = not is_parameter or x.requires_grad
            if moved and is_parameter and self._is_cast(x):
                self._stale = True
                continue
            wrote = noted or moved or own and new != mark
            if copy is not None and (wrote or compare):
                wrote = not _holds_still(x, copy) or wrote and copy.shape != x.shape
            if wrote:
                # ``p.data.clamp_()`` changes no version, but its writes are noted.
                hidden = new[0] == mark[0] and not (noted and is_parameter)
                yield name, x, copy, hidden or new[1] != mark[1]

    def _is_cast(self, x: T) -> bool:
        """True if a parameter holds the numbers of before in another dtype."""
        first = self._first[id(x)]
        return x.dtype != first.dtype and have_same_bits(first.to(x.dtype), x.detach())


def _mark(x: T) -> tuple[int, int]:
    """Returns a tensor's version and address."""
    return x._version, x.data_ptr() if x.layout is torch.strided else 0


def memory(x: T) -> int:
    """Returns the address of a tensor's memory, which its views share."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            x = x.to_local()
    if x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return 0
    return x.untyped_storage().data_ptr()


def _view(x: T) -> Any:
    """Returns the entries of a tensor to compare: all, or some if there are many."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    view = x.detach()
    while view.numel() > _MANY:
        longest = max(range(view.dim()), key=view.shape.__getitem__)
        view = view.transpose(0, longest)[::2]
    return view


def _holds_still(x: T, copy: T) -> bool:
    """True if a tensor's entries equal an earlier copy of its :func:`_view`."""
    view = _view(x)
    return view is not None and have_same_bits(view, copy)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_around(key: str) -> bool:
    return key in _AROUND or key.startswith(("__", "_opacus_ext"))


def _flat(places: list[Any]) -> list[Any]:
    """Returns all keys and values."""
    entries = list(map(_entries, places))
    return [*chain(*entries), *chain(*(e.values() for e in entries))]


def _same(new: Mapping, old: Mapping) -> bool:
    """True if both hold the same objects, or equal plain values."""
    return new.keys() == old.keys() and all(
        x is y or type(x) is type(y) and type(x) in _QUICK and are_same(x, y)
        for x, y in ((x, old[key]) for key, x in new.items())
    )


def _equal(new: Any, old: Any) -> bool:
    """True if these are one object, or containers of equal plain values."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, PLAIN):
        return are_same(new, old)
    if not isinstance(new, _CONTAINERS):
        return False
    new, old = _entries(new), _entries(old)
    return new.keys() == old.keys() and all(_equal(new[key], old[key]) for key in new)


def _is_mutable(x: Any) -> bool:
    """True if the contents of an object may change."""
    if isinstance(x, _CONTAINERS):
        return not isinstance(x, (tuple, frozenset))
    return bool(_entries(x)) or _vars(x) is not None and not inspect.isroutine(x)


def _put_back(value: Any, entries: dict) -> bool:
    """Restores the entries of an object; returns True if that worked."""
    place = value if isinstance(value, (dict, set)) else _vars(value)
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(entries.values())
    elif isinstance(place, (dict, set)) and not _slots(type(value)):
        place.clear()
        place.update(entries)
    return _same(_entries(value), entries)


def _entries(value: Any) -> Mapping:
    """Returns the direct entries of an object."""
    if isinstance(value, (dict, MappingProxyType)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return dict(enumerate(value.flat))
    if isinstance(value, (np.ndarray, bytearray)):
        return {np.shape(value): bytes(value)}
    if isinstance(value, type):
        return vars(value)
    own = _vars(value) or {}
    slots = {n: getattr(value, n) for n in _slots(type(value)) if hasattr(value, n)}
    return {**own, **slots} if slots else own


def _vars(value: Any) -> dict[str, Any] | None:
    try:  # skips a ``__getattribute__`` of the class, which may be slow
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@functools.cache
def _slots(kind: Any) -> list[str]:
    slots = (vars(cls).get("__slots__", ()) for cls in kind.__mro__)
    names = [n for some in slots for n in ((some,) if type(some) is str else some)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _walk(
    root: Any, named: bool | None = False
) -> Iterator[tuple[str, Any, bool | None]]:
    """
    Yields an object and everything in it at any depth, except plain values: the name of
    the attribute, the value, and True if the value's entries are attributes.
    """
    todo: deque[tuple[str, Any, bool | None]] = deque([("", root, named)])
    seen: dict[int, Any] = {}
    while todo:
        name, x, named = todo.popleft()
        if type(x) in _QUICK or id(x) in seen or x is _GONE:
            continue
        kind: Any = type(x)
        is_module, package = isinstance(x, nn.Module), kind.__module__.partition(".")[0]
        if not (is_module or named) and isinstance(x, PLAIN):
            continue
        if package in ("opacus", "opacus_ext") and not is_module:
            continue  # objects for training, such as a private criterion
        if not is_module and kind.__module__.startswith("torch.distributed."):
            continue  # shards, and what gathers them
        seen[id(x)] = x
        named = True if is_module else named
        yield name, x, named
        if isinstance(x, T):
            continue
        if inspect.ismethod(x):
            todo.append((name, x.__self__, False))
        if issubclass(kind, FSDPModule):  # made of the class below it
            kind = kind.__mro__[2]
            package = kind.__module__.partition(".")[0]
        if (is_module or x is root) and package not in ("builtins", "torch"):
            todo.append((kind.__name__, kind, True))
        for key, value in _entries(x).items():
            if type(value) not in _QUICK and not (named and _is_around(key)):
                inner = _join(name, key) if named and key not in _PARTS else name
                of_hooks = None if named and key in _HOOKS else False
                if key == "_parameters" and hasattr(x, "_is_fsdp_managed_module"):
                    continue  # replaced by whole parameters, and back
                todo.append((inner, value, key in _PARTS or of_hooks))
            if not named:
                todo.append((name, key, False))


def holds_data(value: Any, is_data: Callable[[T], bool]) -> bool:
    """True if an object holds a tensor of data, or an opaque object."""
    for _, x, _ in _walk(value):
        if isinstance(x, T):
            if is_data(x):
                return True
        elif not isinstance(x, _CONTAINERS) and not _vars(x):
            is_function = inspect.isroutine(x) and not getattr(x, "__closure__", None)
            if not is_function and not hasattr(type(x), "__slots__"):
                return True
    return False


# -- tensors made of data --------------------------------------------------------------

_SET_DATA = getattr(T.data, "__set__")


class TensorSet:
    """A set of tensors by identity, with weak references."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref] = {}

    def add(self, x: T) -> None:
        """Adds a tensor."""
        self._refs[id(x)] = weakref.ref(x)

    def __contains__(self, x: Any) -> bool:
        found = self._refs.get(id(x))
        return found is not None and found() is x


class Notes:
    """Trainable leaves that a forward has made, and memory of a state it wrote to."""

    def __init__(self, state: State):
        self._watches = state.watches
        self.leaves, self.written = TensorSet(), set[int]()

    def call(self, func: Callable, args: tuple, run: Callable[[], Any]) -> Any:
        """Runs ``func``, and notes a written argument and a leaf that it returns."""
        x = args[0] if args and isinstance(args[0], T) and _writes(func) else None
        if x is not None and (is_batched(x) or not self._watches(x)):
            x = None
        before = None if x is None else _view(x)
        before = None if before is None else before.clone()
        found = run()
        if x is not None and (before is None or not _holds_still(x, before)):
            self.written.add(memory(x))
        if isinstance(found, T) and found.requires_grad and found.is_leaf:
            self.leaves.add(found)
        return found


class AloneSample(Reads):
    """
    Tracks which tensors are made of data while a sample runs alone: all, except those
    that the model holds and those computed from these.

    Attributes:
        written: addresses of memory without data before, to which data was written
    """

    def __init__(self, state: State, sees_ops: bool = False):
        super().__init__(sees_ops)
        self.notes = Notes(state)
        self._state, self._made = state, TensorSet()
        self.written: set[int] = set()

    def is_data(self, x: T) -> bool:
        """True if a tensor is made of the sample's data."""
        free = self._state.holds(x) or x in self._made
        return not free or bool(self.written) and memory(x) in self.written

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, and tracks which tensors are made of data."""
        given = list(tensors_in((*args, *kwargs.values())))
        into = [(x, x._version) for x in given if not self.is_data(x)]
        found = func(*args, **kwargs)
        if any(map(self.is_data, given)):
            self.written |= {memory(x) for x, version in into if x._version != version}
        else:
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, T):
                    self._made.add(x)
        return found

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        run = partial(super().__torch_function__, func, types, args, kwargs)
        told = self._ops.told
        found = self.notes.call(func, args, run)
        self._ops.told = told  # notes compare tensors
        return found


@functools.lru_cache(1024)
def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name[-1:] == "_" and name[-2:] != "__" and name != "requires_grad_"
    # Setting ``p.data`` changes the address, unless it is the same memory.
    is_set = name == "__set__" and func != _SET_DATA
    return in_place or name == "__setitem__" or is_set
