"""What containers and objects hold: their entries, compared and put back.

:class:`Outcome` compares what samples that run one by one leave on modules.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections import OrderedDict, deque
from functools import partial
from itertools import chain
from operator import methodcaller
from types import MappingProxyType
from typing import Any, Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

from opacus_ext.grad_sample.core.values import are_same, compared_entries

T = torch.Tensor

#: Types of values that hold no other objects.
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
    *(torch.layout, torch.memory_format, np.generic),
)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_DICTS = {dict, OrderedDict, MappingProxyType}
_HOLD = {*_DICTS, *_SEQUENCES, *_SETS}
QUICK = {int, float, bool, str, bytes, type(None)}  # the most frequent of PLAIN
GONE = object()  # in the place of an entry that is not there


_values = methodcaller("values")


def flat(values: list[Any]) -> list[Any]:
    """Returns all keys and values of these containers."""
    entries = [x if type(x) is dict else entries_of(x) for x in values]
    return [*chain(*entries), *chain(*map(_values, entries))]


def have_same_entries(new: Mapping, old: Mapping) -> bool:
    """Returns True if both hold the same objects, or equal plain values."""
    return new.keys() == old.keys() and all(
        x is y or type(x) is type(y) and type(x) in QUICK and are_same(x, y)
        for x, y in ((x, old[key]) for key, x in new.items())
    )


def are_equal(new: Any, old: Any) -> bool:
    """Returns True for one object, equal plain values, or containers of equal ones."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, PLAIN):
        return are_same(new, old)
    if not isinstance(new, (dict, *_SEQUENCES, *_SETS, np.ndarray)):
        return False
    new, old = entries_of(new), entries_of(old)
    return new.keys() == old.keys() and all(
        are_equal(new[key], old[key]) for key in new
    )


def put_back(value: Any, entries: dict) -> bool:
    """Restores the entries of an object; returns True if that worked."""
    kind: Any = type(value)
    attributes = value if isinstance(value, (dict, set)) else _vars(value)
    if isinstance(value, type):
        for name in {**entries, **vars(value)}:
            if name not in entries:
                delattr(value, name)
            elif entries[name] is not vars(value).get(name, GONE):
                setattr(value, name, entries[name])
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(entries.values())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        for shape, numbers in entries.items():
            value[...] = np.frombuffer(numbers, value.dtype).reshape(shape)
    elif isinstance(attributes, (dict, set)) and not _slots(kind):
        attributes.clear()
        attributes.update(entries)
    return have_same_entries(entries_of(value), entries)


def entries_of(value: Any) -> Mapping:
    """Returns the direct entries of a container, or the attributes of an object."""
    kind: Any = type(value)  # isinstance() may call a slow ``__getattribute__``
    return _reader_of(kind)(value)


@functools.cache
def _reader_of(kind: Any) -> Callable[[Any], Mapping]:
    """Returns what reads the entries of values of this type."""
    if kind in _DICTS:
        return lambda value: value
    if issubclass(kind, dict):  # whose methods may do anything
        return lambda value: dict(dict.items(value))
    if issubclass(kind, _SEQUENCES):
        return lambda value: dict(enumerate(value))
    if issubclass(kind, _SETS):
        return dict.fromkeys
    if issubclass(kind, (np.ndarray, bytearray)):
        return _of_array
    return vars if issubclass(kind, type) else partial(_of_object, _slots(kind))


def _of_array(value: Any) -> dict:
    if getattr(value, "dtype", None) == object:
        return dict(enumerate(value.flat))
    return {np.shape(value): bytes(value)}


def _of_object(slots: list[str], value: Any) -> dict[str, Any]:
    attributes = _vars(value) or {}
    if not slots:
        return attributes
    return {**attributes, **{n: getattr(value, n) for n in slots if hasattr(value, n)}}


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


def is_looked_into(x: Any) -> bool:
    """Returns True for containers and objects, but not those of libraries around."""
    kind = type(x)
    around = kind.__module__.partition(".")[0] in ("opacus", "opacus_ext")
    if around or kind.__module__.startswith("torch.distributed."):
        return False  # objects for training, shards, and what gathers them
    return not (inspect.isroutine(x) or isinstance(x, PLAIN))


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields tensors, plain values and opaque objects in an object, at any depth."""
    todo, seen = [value], set[int]()
    while todo:
        x = todo.pop()
        if inspect.ismethod(x):
            x = x.__self__
        if isinstance(x, (T, *PLAIN)) or x is GONE or inspect.isroutine(x):
            yield x
        elif id(x) not in seen and is_looked_into(x):
            seen.add(id(x))
            entries = entries_of(x)
            if entries or _vars(x) is not None or type(x) in _HOLD:
                todo += [*entries, *entries.values()]
            else:
                yield x


def is_opaque(x: Any) -> bool:
    """Returns True for a leaf that may hold data, such as an iterator or a closure."""
    if isinstance(x, (T, *PLAIN)) or x is GONE:
        return False
    return not inspect.isroutine(x) or bool(getattr(x, "__closure__", None))


def holds_data(value: Any, is_data: Callable[[T], bool]) -> bool:
    """Returns True if an object holds a tensor of data, or an opaque object."""
    return any(
        is_data(x) if isinstance(x, T) else is_opaque(x) for x in leaves_of(value)
    )


class Outcome:
    """What samples leave behind on modules, which is to be the same for all of them."""

    def __init__(self) -> None:
        self._first: dict[str, list[Any]] | None = None

    def differs(self, changes: Iterable[tuple[str, Any, bool]]) -> str | None:
        """Returns the name of what these leave and the first ones did not."""
        found: dict[str, list[Any]] = {}
        for name, value, _ in changes:
            leaves = list(leaves_of(value))
            if any(map(is_opaque, leaves)):
                return name
            found.setdefault(name, []).extend(map(_kept, leaves))
        if self._first is None:
            self._first = found
        for name in {**self._first, **found}:
            new, old = found.get(name, []), self._first.get(name, [])
            if len(new) != len(old) or not all(map(are_same, new, old)):
                return name
        return None


def _kept(x: Any) -> Any:
    """Returns a copy of a tensor's entries, or ``x``."""
    view = compared_entries(x) if isinstance(x, T) else None
    return x if view is None else view.clone()


def line_that_sets(modules: Iterable[nn.Module], name: str) -> str:
    """Returns where the code of a module sets an attribute, to be read; or ``""``."""
    attribute = name.rpartition(".")[2]
    for kind in {type(module): None for module in modules}:
        try:
            lines, first = inspect.getsourcelines(kind)
            path = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        inside = ""
        for number, line in enumerate(lines, start=first):
            inside = line if line.lstrip().startswith("def ") else inside
            sets = re.search(rf"\.{attribute}\b(\[.*\])?(\.\w+\(|\s*\S?=[^=])", line)
            if sets and "__init__" not in inside:
                return f' ("{line.strip()}", line {number} of {path})'
    return ""
