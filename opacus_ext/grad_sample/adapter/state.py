"""What a forward leaves on modules: compared at each call, and put back.

A private model is a function of its inputs, parameters, buffers and random numbers. A
forward that keeps something of its data for the next would carry it there without
noise. So what modules hold is found once, however deep: dicts, other containers and
tensors. Each is compared with a copy of what it held, item by item. What in a run is
made of data is known here, too.
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections import deque
from copy import deepcopy
from operator import is_
from types import MappingProxyType
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.core.groups import ASKING
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import HANDLERS

T = torch.Tensor

# What every module has: hooks and registries of its parts, which torch itself changes.
_OWN = set(vars(nn.Module())) | {"autograd_grad_sample_hooks"}  # Opacus's
_AROUND = _OWN | {"_flat_weights", "_flat_weight_refs", "_trainer", "_fabric"}
_HOOKS = {name for name in _OWN if "hook" in name} | {"_compiled_call_impl"}
_HOOKS.add("max_batch_len")  # of Opacus's recurrent layers, for packed sequences
_HOOKS |= {"_flat_weights", "_flat_weight_refs"}  # of torch's, of the weights there are
_PARTS = ("_parameters", "_buffers", "_modules")
#: What is not looked into.
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
    *(torch.layout, torch.memory_format, np.generic),
)
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, deque),
    *(np.ndarray, bytearray, MappingProxyType),
)
# What classes set and never read in training: here the last state of a scan, which
# decoding alone goes on from. A class of the user's says so by ``transient``.
_TRANSIENT = {"RecurrentGemmaRglru": ("recurrent_states",)}  # of transformers
_QUICK = {int, float, bool, str, bytes, type(None)}  # of these, the most
_MANY = 10_000  # entries beyond which containers and tensors are not looked into
_GONE = object()


class Change(NamedTuple):
    """
    Something that a forward has left: its name, what is new, and whether a kernel has
    left the version of a tensor as it was, as that of BatchNorm does.
    """

    name: str
    value: Any
    hidden: bool = False


class _Held(NamedTuple):
    """Something that may hold others later, and what it held before."""

    name: str | None  # of the attribute, or the module; hooks, without, are not told of
    value: Any
    before: Any = None  # of modules, classes and hooks a dict, else a list of items

    def changes(self, equal: Callable[[Any, Any], bool]) -> Iterator[Change]:
        """What has changed of a module or a class."""
        for key in () if self.name is None else {**self.before, **self.value}:
            new, old = self.value.get(key, _GONE), self.before.get(key, _GONE)
            if not (key in _HOOKS or key.startswith("__") or equal(new, old)):
                yield Change(_join(self.name or "", key), new)


class State:
    """What all modules of a model hold, or what another object holds."""

    def __init__(self, root: Any):
        self.root = root
        self._whole: set[int] = set()  # large tensors that have changed in place
        self._look()

    def __deepcopy__(self, memo: dict) -> State:
        new = State(None)  # what there is in a copy is found when it is whole
        memo[id(self)] = new
        new.root = deepcopy(self.root, memo)
        new._stale = True
        return new

    def _look(self) -> None:
        """Finds what there is to compare, and copies it."""
        modules = {"": self.root} if hasattr(self.root, "__dict__") else {}
        if isinstance(self.root, nn.Module):
            modules = dict(self.root.named_modules())
        _add_unregistered(modules)
        self.modules = list(modules.values())
        self._transient, places = [], []
        for name, m in modules.items():
            parts = _PARTS if isinstance(m, nn.Module) else ()
            places += [(name, vars(m)), *((name, vars(m)[part]) for part in parts)]
            names = getattr(type(m), "transient", _TRANSIENT.get(type(m).__name__, ()))
            self._transient += [(vars(m), names)] if names else []
        kinds = {type(m): None for m in self.modules}
        own = [cls for cls in kinds if not cls.__module__.startswith("torch.")]
        places += [(cls.__name__, cls.__dict__) for cls in own]
        self._dicts = [_Held(name, place) for name, place in places]
        self._others: list[_Held] = []
        tensors: dict[int, tuple[str, T]] = {}
        seen = {id(x): x for x in (*(place for _, place in places), *self.modules)}
        for name, place in places:
            for key, value in place.items():
                if type(value) in _QUICK:
                    continue
                whole = [value]
                if key in _HOOKS and isinstance(value, dict):
                    self._dicts.append(_Held(None, value))
                    whole = list(value.values()) if "forward" in key else []  # objects
                elif not isinstance(value, T) and (
                    key in _AROUND or key.startswith(("_opacus_ext", "__"))
                ):
                    continue
                for x in (x for each in whole for x in _inside(each, seen)):
                    if isinstance(x, T):
                        tensors.setdefault(id(x), (_join(name, key), x))
                    elif _is_mutable(x):
                        self._others.append(_Held(_join(name, key), x))
        self._tensors = tensors
        self.tensors = [x for _, x in tensors.values()]
        self._memory = [memory(x) for x in self.tensors]
        self._marks = [_mark(x) for x in self.tensors]
        views = ((i, self._view(x)) for i, x in enumerate(self.tensors))
        self._views = {i: view for i, view in views if view is not None}
        self.has_objects = bool(self._others)  # beside modules and tensors
        self._stale = False
        self._copy()

    def _view(self, x: T) -> T | None:
        """What of a tensor is compared: all entries, or some if there are many."""
        whole = id(x) in self._whole
        is_parameter = isinstance(x, nn.Parameter) and not whole
        if is_parameter or x.layout is not torch.strided or x.is_meta:
            return None
        view = x.detach()
        while view.numel() > _MANY and not whole:
            longest = max(range(view.dim()), key=view.shape.__getitem__)
            view = view.transpose(0, longest)[::2]
        return view

    def _copy(self) -> None:
        self._dicts = [h._replace(before=dict(h.value)) for h in self._dicts]
        self._others = [h._replace(before=_items(h.value)) for h in self._others]
        self._empty = [held.value for held in self._dicts if not held.value]
        self._full = [held.value for held in self._dicts if held.value]
        self._before = [held.before for held in self._dicts if held.value]
        self._values = [x for place in self._full for x in place.values()]

    def holds(self, x: T) -> bool:
        """Whether a tensor is one of these."""
        return id(x) in self._tensors and self._tensors[id(x)][1] is x

    # -- before and after --------------------------------------------------------------

    def remember(self) -> None:
        """Copies what there is now, to compare with it later."""
        self._forget_transient()
        before, self._marks = self._marks, [_mark(x) for x in self.tensors]
        replaced = self._replaced()
        if (
            self._stale
            or any(new[1] != old[1] for new, old in zip(self._marks, before))
            or not all(_same(_items(h.value), h.before) for h in self._others)
            or any(
                type(c.value) not in _QUICK for h in replaced for c in h.changes(is_)
            )
        ):
            self._look()
        elif replaced:  # numbers, such as a count of calls
            self._copy()
        self._written: set[int] = set()
        self._kinds = [type(module) for module in self.modules]
        self._copies = {i: view.clone() for i, view in self._views.items()}

    def changes(self, written: Iterable[int] = ()) -> list[Change]:
        """What has changed since :meth:`remember`; ``written``: memory known to be."""
        self._forget_transient()
        self._written |= set(written)
        found = []
        if any(self._empty) or _differ(self._full, self._before):
            found += [c for held in self._replaced() for c in held.changes(_equal)]
        for name, value, before in self._others:
            now, known = _items(value), set(map(id, before))
            if not _same(now, before) and not _equal(now, before):
                found.append(Change(name, [x for x in now if id(x) not in known]))
        for i, hidden in self._rewritten():
            name, x = self._tensors[id(self.tensors[i])]
            found.append(Change(name, x, hidden))
        return found

    def restore(self) -> str | None:
        """Puts back what was there; the name of what can't be put back, if any."""
        self._forget_transient()
        lost = None
        for name, place, before in self._replaced():
            if isinstance(place, dict):
                place.clear()
                place.update(before)
            else:
                lost = f"class {name}"
        for name, value, before in self._others:
            if not _same(_items(value), before) and not _put_back(value, before):
                lost = name
        for i, _ in self._rewritten():
            name, x = self._tensors[id(self.tensors[i])]
            copy = self._copies.get(i)
            if copy is None or copy.shape != x.shape:
                lost = name
            else:
                with torch.no_grad():
                    x.copy_(copy)
        for x, (version, _, flag) in zip(self.tensors, self._marks):
            if x.requires_grad and x._version != version and x.is_leaf:
                lost = f"a parameter of shape {tuple(x.shape)} in place"
            if x.requires_grad != flag:
                x.requires_grad_(flag)
        for module, kind in zip(self.modules, self._kinds):
            if type(module) is not kind:
                module.__class__ = kind
        self._marks = [_mark(x) for x in self.tensors]
        return lost

    def _forget_transient(self) -> None:
        for place, names in self._transient:
            place.update(dict.fromkeys(names))

    def _replaced(self) -> list[_Held]:
        """Modules, classes and hooks that hold other objects than before."""
        if not any(self._empty) and not _differ(self._full, self._before):
            values = [x for place in self._full for x in place.values()]
            if all(map(is_, values, self._values)):  # not only equal
                return []
        held = (h for h in self._dicts if h.value or h.before)
        return [h for h in held if not _same(_items(h.value), _items(h.before))]

    def _rewritten(self) -> list[tuple[int, bool]]:
        """Which tensors hold other numbers, and whether their version is the same."""
        marks = [_mark(x) for x in self.tensors]
        at = {i for i, pair in enumerate(zip(marks, self._marks)) if pair[0] != pair[1]}
        if self._written:
            at |= {i for i, place in enumerate(self._memory) if place in self._written}
        pairs = ((i, view, self._copies[i]) for i, view in self._views.items())
        at |= {i for i, view, copy in pairs if not torch.equal(view, copy)}
        found = []
        for i in sorted(at):
            x, copy = self.tensors[i], self._copies.get(i)
            kept = marks[i][0] == self._marks[i][0]
            moved = marks[i][1] != self._marks[i][1]
            same = copy is None or torch.equal(self._view(x), copy)
            wrote = moved or self._memory[i] in self._written
            if copy is not None and copy.shape == x.shape:
                if not same:
                    found.append((i, kept))
            elif wrote or not (same and kept):
                self._whole.add(id(x))
                self._stale = True
                # A parametrization that comes and goes sets a parameter to itself.
                if wrote or not isinstance(x, nn.Parameter):
                    found.append((i, moved or not same and kept))
        return found


def _mark(x: T) -> tuple[int, int, bool]:
    """A tensor's version, where it is, and whether it is trained."""
    place = x.data_ptr() if x.layout is torch.strided else 0
    return x._version, place, x.requires_grad


def memory(x: T) -> int:
    """Where a tensor's memory begins, the same for its views."""
    return 0 if x.layout is not torch.strided else x.untyped_storage().data_ptr()


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _differ(new: Any, old: Any) -> bool:
    try:
        return bool(new != old)  # the same object is equal to itself, whatever it is
    except Exception:  # tensors and arrays, which are not equal or unequal
        return True


def _same(items: list[Any], before: list[Any]) -> bool:
    """Whether these are the same objects, or the same numbers."""
    if len(items) != len(before) or all(map(is_, items, before)):
        return len(items) == len(before)
    return all(
        x is y or type(x) is type(y) and type(x) in _QUICK and x == y
        for x, y in zip(items, before)
    )


def _equal(new: Any, old: Any) -> bool:
    """Whether these are the same objects, or hold equal plain ones."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, PLAIN):
        return bool(new == old)
    if not isinstance(new, _CONTAINERS) or len(new) != len(old):
        return False
    return all(map(_equal, _items(new), _items(old)))


def _is_mutable(x: Any) -> bool:
    """Whether it may hold something else later, itself."""
    if isinstance(x, _CONTAINERS):
        return not isinstance(x, (tuple, frozenset))
    return bool(_items(x)) or _vars(x) is not None and not inspect.isroutine(x)


def _put_back(value: Any, items: list[Any]) -> bool:
    """Gives an object the items that it had; whether it has them now."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value[...] = np.frombuffer(items[0], value.dtype).reshape(value.shape)
    elif isinstance(value, bytearray):
        value[:] = items[0]
    elif isinstance(value, (list, set, deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)
    else:
        names, place = items[: len(items) // 2], _vars(value)
        place = value if isinstance(value, dict) else place
        if place is not None and not _slots(type(value)):
            place.clear()
            place.update(zip(names, items[len(names) :]))
    return _same(_items(value), items)


def _items(value: Any) -> list[Any]:
    """What an object holds itself; of a large container, how many."""
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype == object else [value.tobytes()]
    if isinstance(value, bytearray):
        return [bytes(value)]
    if isinstance(value, _CONTAINERS):
        if len(value) > 100 * _MANY:
            return [len(value)]
        if isinstance(value, (dict, MappingProxyType)):
            return [*value, *value.values()]
        ordered = isinstance(value, (list, tuple, deque))
        return list(value) if ordered else sorted(value, key=id)
    own = _vars(value) or {}
    slots = [getattr(value, n) for n in _slots(type(value)) if hasattr(value, n)]
    return [*own, *slots, *own.values()]


def _vars(value: Any) -> dict[str, Any] | None:
    try:  # as quick for classes that look at each attribute that is asked for
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@functools.cache
def _slots(kind: Any) -> list[str]:
    slots = (vars(cls).get("__slots__", ()) for cls in kind.__mro__)
    names = [n for some in slots for n in ((some,) if type(some) is str else some)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _inside(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """What an object is and holds, however deep, but for plain things and ``seen``."""
    todo = [value]
    while todo:
        x = todo.pop()
        if type(x) in _QUICK or id(x) in seen or x is _GONE:
            continue
        if isinstance(x, PLAIN) and not isinstance(x, nn.Module):
            continue
        if type(x).__module__.partition(".")[0] in ("opacus", "opacus_ext"):
            continue  # what trains the model: a private criterion, set on it
        seen[id(x)] = x
        yield x
        if inspect.ismethod(x):
            todo.append(x.__self__)
        elif not isinstance(x, (T, nn.Module)):
            todo += _items(x)


def _add_unregistered(modules: dict[str, Any]) -> None:
    """Adds modules that others hold otherwise than as their parts, in a list."""
    todo, seen = list(modules.items()), {id(m): m for m in modules.values()}
    while todo:
        name, m = todo.pop()
        for key, value in vars(m).items():
            for x in () if key in _AROUND else _inside(value, seen):
                if isinstance(x, nn.Module):
                    new = dict(x.named_modules(prefix=_join(name, key)))
                    seen.update((id(part), part) for part in new.values())
                    modules.update(new)
                    todo += new.items()


def holds_data(value: Any, is_data: Callable[[T], bool]) -> bool:
    """Whether an object holds a tensor of data, or what can't be looked into."""
    for x in _inside(value, {}):
        if isinstance(x, T):
            if is_data(x):
                return True
        elif not isinstance(x, _CONTAINERS) and not _vars(x):
            is_function = inspect.isroutine(x) and not getattr(x, "__closure__", None)
            if not is_function and not hasattr(type(x), "__slots__"):
                return True
    return False


# -- what is made of data --------------------------------------------------------------

_SET_DATA = getattr(T.data, "__set__")


class Known:
    """Tensors known by identity, as long as they live."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref] = {}

    def add(self, x: T) -> None:
        """Makes a tensor known."""
        self._refs[id(x)] = weakref.ref(x)

    def __contains__(self, x: Any) -> bool:
        found = self._refs.get(id(x))
        return found is not None and found() is x


class Notes:
    """Leaves that a run has made, and memory that it has written to."""

    def __init__(self) -> None:
        self.leaves = Known()  # that the code has made, with a gradient of their own
        self.written: set[int] = set()  # where memory begins that was written to

    def take(self, func: Callable, args: tuple, found: Any) -> None:
        """Notes a function that was called, by its arguments and its result."""
        if args and isinstance(args[0], T) and _writes(func):
            if not is_batched(args[0]):
                self.written.add(memory(args[0]))
        if isinstance(found, T) and found.requires_grad and found.is_leaf:
            self.leaves.add(found)


class AloneSample(TorchFunctionMode):
    """
    Follows a sample that runs alone, by ordinary autograd. Every tensor counts as made
    of its data but those known not to be, such as the tensors that the model holds.

    Attributes:
        told_data: whether the code was told a number of the data
        written: memory, not of data before, that data went to
    """

    def __init__(self, state: State):
        super().__init__()
        self.told_data, self.notes = False, Notes()
        self._state, self._made = state, Known()
        self.written: set[int] = set()

    def is_data(self, x: T) -> bool:
        """Whether a tensor is made of the sample's data."""
        known = self._state.holds(x) or x in self._made
        return not known or bool(self.written) and memory(x) in self.written

    def agree(self, x: T) -> T:
        """Notes that the code asks for the value of a tensor."""
        self.told_data = self.told_data or isinstance(x, T) and self.is_data(x)
        return x

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, and notes what is made of data."""
        given = list(_tensors((*args, *kwargs.values())))
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
        handler = HANDLERS.get(func)
        if handler in ASKING:
            found = handler(self, func, *args, **(kwargs or {}))
        else:
            found = self.call(func, *args, **(kwargs or {}))
        self.notes.take(func, args, found)
        return found


@functools.lru_cache(1024)
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
