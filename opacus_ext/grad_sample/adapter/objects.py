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
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType
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
    *(torch.layout, torch.memory_format, np.generic, CodeType),
)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_DICTS = {dict, OrderedDict, MappingProxyType}
_HOLD = {*_DICTS, *_SEQUENCES, *_SETS}
QUICK = {int, float, bool, str, bytes, type(None)}  # the most frequent of PLAIN
#: Types of containers, which may have attributes beside their entries.
CONTAINERS = (dict, *_SEQUENCES, *_SETS, np.ndarray)
GONE = object()  # in the place of an entry that is not there


_values = methodcaller("values")


def flat(values: list[Any]) -> list[Any]:
    """Returns all keys and values of these containers."""
    entries = [x if type(x) in _DICTS else entries_of(x) for x in values]
    return [*chain(*entries), *chain(*map(_values, entries))]


def have_same_entries(new: Mapping, old: Mapping) -> bool:
    """Returns True if both hold the same objects, or equal plain values, in order."""
    return have_same_keys(new, old) and all(
        x is y or type(x) is type(y) and type(x) in QUICK and are_same(x, y)
        for x, y in zip(new.values(), old.values())
    )


def have_same_keys(new: Mapping, old: Mapping) -> bool:
    """Returns True for the same keys in one order; equal ones may be different."""
    return len(new) == len(old) and all(map(are_same, new, old))


def are_equal(new: Any, old: Any) -> bool:
    """Returns True for one object, equal plain values, or containers of equal ones."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, PLAIN):
        return are_same(new, old)
    if not isinstance(new, CONTAINERS):
        return False
    new, old = entries_of(new), entries_of(old)
    return have_same_keys(new, old) and all(map(are_equal, new.values(), old.values()))


def put_back(value: Any, entries: dict) -> bool:
    """Restores the entries of an object; returns True if that worked."""
    kind: Any = type(value)
    attributes = value if isinstance(value, (dict, set)) else attributes_of(value)
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
        return lambda value: dict.fromkeys(sorted(value, key=hash))  # in no order
    if issubclass(kind, (np.ndarray, bytearray)):
        return _of_array
    return vars if issubclass(kind, type) else partial(_of_object, _slots(kind))


def _of_array(value: Any) -> dict:
    if getattr(value, "dtype", None) == object:
        return dict(enumerate(value.flat))
    return {np.shape(value): bytes(value)}


def _of_object(slots: list[str], value: Any) -> dict[str, Any]:
    attributes = attributes_of(value) or {}
    if not slots:
        return attributes
    return {**attributes, **{n: getattr(value, n) for n in slots if hasattr(value, n)}}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the dict of an object's attributes; None if it has none."""
    try:  # skips a ``__getattribute__`` of the class, which may be slow
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@functools.cache
def _slots(kind: Any) -> list[str]:
    """Returns attributes that no dict holds, by the names that Python gives them."""
    slotted = [x for x in kind.__mro__ if "__slots__" in vars(x) or x is partial]
    named = [item for cls in slotted for item in vars(cls).items()]
    names = [name for name, x in named if isinstance(x, MemberDescriptorType)]
    return [name for name in names if not name.startswith("__")]  # of Python itself


def is_looked_into(x: Any) -> bool:
    """Returns True for containers and objects, but not those of libraries around."""
    kind = type(x)
    around = kind.__module__.partition(".")[0] in ("opacus", "opacus_ext")
    if around or kind.__module__.startswith("torch.distributed."):
        return False  # objects for training, shards, and what gathers them
    return not (inspect.isroutine(x) or isinstance(x, PLAIN))


def leaves_of(value: Any, modules: bool = False) -> Iterator[Any]:
    """
    Yields tensors, plain values, types and opaque objects in an object, at any depth;
    with ``modules`` what modules hold, instead of these.
    """
    todo, seen = [value], set[int]()
    while todo:
        x = todo.pop()
        if inspect.ismethod(x):
            x = x.__self__
        if isinstance(x, FunctionType) and not x.__closure__:  # equal if new
            todo += [x.__defaults__, x.__kwdefaults__, vars(x)]
            x = x.__code__
        looks_into = modules and isinstance(x, nn.Module)
        if not looks_into and _is_leaf(x):
            yield x
        elif id(x) not in seen and (looks_into or is_looked_into(x)):
            seen.add(id(x))
            yield type(x)
            entries, attributes = entries_of(x), attributes_of(x)
            if entries or attributes is not None or type(x) in _HOLD:
                todo += [*entries, *entries.values(), *(attributes or {}).values()]
            else:
                yield x


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (T, *PLAIN)) or x is GONE or inspect.isroutine(x)


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
            leaves = list(leaves_of(value, modules=True))
            if any(map(is_opaque, leaves)):
                return name
            kept = [x if _is_held(x, value) else _kept(x) for x in leaves]
            found.setdefault(name, []).extend(kept)
        if self._first is None:
            self._first = found
        for name in {**self._first, **found}:
            new, old = found.get(name, []), self._first.get(name, [])
            if len(new) != len(old) or not all(map(are_same, new, old)):
                return name
        return None


def _is_held(x: Any, value: Any) -> bool:
    """Returns True for a parameter in something: it is not what was written to."""
    return isinstance(x, nn.Parameter) and x is not value


def _kept(x: Any) -> Any:
    """Returns a copy of a tensor, or ``x``."""
    is_plain = isinstance(x, T) and compared_entries(x) is not None
    return x.detach().clone() if is_plain else x


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
