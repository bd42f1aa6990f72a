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
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping

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


class _Gone:
    """The type of :data:`GONE`."""


GONE = _Gone()  # stands for an entry that is not there
_VALUES = (T, *PLAIN, _Gone)


# -- entries ---------------------------------------------------------------------------

_values = methodcaller("values")


def flat(containers: list[Any]) -> list[Any]:
    """Returns all keys and values of these containers."""
    # A dict is its own entries. There are many, so they are spared the call.
    entries = [x if type(x) in _DICTS else entries_of(x) for x in containers]
    return [*chain(*entries), *chain(*map(_values, entries))]


def have_same_entries(new: Mapping, old: Mapping) -> bool:
    """Returns True if both hold the same objects, or equal plain values, in order."""
    return are_all_same(new, old) and all(map(_are_one, new.values(), old.values()))


def _are_one(new: object, old: object) -> bool:
    if new is old:
        return True
    return type(new) is type(old) and type(new) in QUICK and are_same(new, old)


def are_all_same(new: Collection, old: Collection) -> bool:
    """
    Returns True for the same items, or keys, in one order. Items that only call
    themselves equal are not the same.
    """
    return len(new) == len(old) and all(map(are_same, new, old))


def are_equal(new: object, old: object) -> bool:
    """Returns True for one object, equal plain values, or containers of equal ones."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, PLAIN):
        return are_same(new, old)
    if not isinstance(new, CONTAINERS):
        return False
    new = entries_of(new)
    old = entries_of(old)
    return are_all_same(new, old) and all(map(are_equal, new.values(), old.values()))


def put_back(value: object, entries: dict) -> bool:
    """Restores the entries of an object; returns True if that worked."""
    kind: Any = type(value)
    if isinstance(value, type):
        _put_back_class(value, entries)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(entries.values())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        for shape, numbers in entries.items():
            value[...] = np.frombuffer(numbers, value.dtype).reshape(shape)
    elif not _slots(kind):
        attributes = value
        if not isinstance(value, (dict, set)):
            attributes = attributes_of(value)
        # An array of objects, or a tuple, has no attributes: it stays as it is.
        if isinstance(attributes, (dict, set)):
            attributes.clear()
            attributes.update(entries)
    return have_same_entries(entries_of(value), entries)


def _put_back_class(kind: type, entries: dict) -> None:
    for name in {**entries, **vars(kind)}:
        if name not in entries:
            delattr(kind, name)
        elif entries[name] is not vars(kind).get(name, GONE):
            setattr(kind, name, entries[name])


def entries_of(value: object) -> Mapping:
    """Returns the direct entries of a container, or the attributes of an object."""
    # No isinstance(), which may call a slow ``__getattribute__`` of the object.
    kind: Any = type(value)
    return _reader_of(kind)(value)


@functools.cache
def _reader_of(kind: type) -> Callable[[Any], Mapping]:
    """Returns what reads the entries of values of this type."""
    slots = _slots(kind)
    if kind in _DICTS:
        return lambda value: value
    # Methods of a class of the user may do anything.
    if issubclass(kind, dict):
        return lambda value: dict(dict.items(value))
    if issubclass(kind, _SEQUENCES):
        return lambda value: dict(enumerate(value))
    if issubclass(kind, _SETS):
        # The order of a set depends on what was in it before.
        return lambda value: dict.fromkeys(sorted(value, key=hash))
    if issubclass(kind, (np.ndarray, bytearray)):
        return _of_array
    if issubclass(kind, type):
        return vars
    return partial(_of_object, slots)


def _of_array(array: Any) -> dict:
    # Numbers are compared by their bytes, which are a copy; a bytearray has no dtype.
    if getattr(array, "dtype", None) == object:
        return dict(enumerate(array.flat))
    return {np.shape(array): bytes(array)}


def _of_object(slots: list[str], value: object) -> dict[str, Any]:
    attributes = attributes_of(value) or {}
    if not slots:
        return attributes
    attributes = dict(attributes)
    for name in slots:
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return attributes


def attributes_of(value: object) -> dict[str, Any] | None:
    """Returns the dict of an object's attributes; None if it has none."""
    # This skips a ``__getattribute__`` of the class, which may be slow.
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@functools.cache
def _slots(kind: type) -> list[str]:
    """Returns attributes that no dict holds, by the names that Python gives them."""
    names = []
    for base in kind.__mro__:
        if "__slots__" not in vars(base) and base is not partial:
            continue
        for name, member in vars(base).items():
            # Names with two underscores are those of Python itself.
            if isinstance(member, MemberDescriptorType) and name[:2] != "__":
                names.append(name)
    return names


# -- leaves ----------------------------------------------------------------------------


def is_looked_into(value: object) -> bool:
    """Returns True for containers and objects, but not those of libraries around."""
    module = type(value).__module__
    # Their objects are for training: shards, and what gathers them.
    if module.startswith("torch.distributed."):
        return False
    if module.partition(".")[0] in ("opacus", "opacus_ext"):
        return False
    return not (inspect.isroutine(value) or isinstance(value, PLAIN))


def leaves_of(value: object, modules: bool = False) -> Iterator[Any]:
    """
    Yields tensors, plain values, types and opaque objects in an object, at any depth;
    with ``modules`` what modules hold, instead of these.
    """
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if inspect.ismethod(item):
            item = item.__self__
        # A function without closure that is made anew is equal to the one before.
        if isinstance(item, FunctionType) and not item.__closure__:
            todo += [item.__defaults__, item.__kwdefaults__, vars(item)]
            item = item.__code__
        looks_into = modules and isinstance(item, nn.Module)
        if not looks_into and (isinstance(item, _VALUES) or inspect.isroutine(item)):
            yield item
        elif id(item) not in seen and (looks_into or is_looked_into(item)):
            seen.add(id(item))
            yield type(item)
            # An object that shows neither may still hold data, as an iterator does.
            entries = entries_of(item)
            attributes = attributes_of(item)
            if entries or attributes is not None or type(item) in _HOLD:
                todo += [*entries, *entries.values(), *(attributes or {}).values()]
            else:
                yield item


def is_opaque(leaf: object) -> bool:
    """Returns True for a leaf that may hold data, such as an iterator or a closure."""
    if isinstance(leaf, _VALUES):
        return False
    return not inspect.isroutine(leaf) or bool(getattr(leaf, "__closure__", None))


def holds_data(value: object, is_data: Callable[[T], bool]) -> bool:
    """Returns True if an object holds a tensor of data, or an opaque object."""
    for leaf in leaves_of(value):
        may_be_data = is_data if isinstance(leaf, T) else is_opaque
        if may_be_data(leaf):
            return True
    return False


class Outcome:
    """What samples leave behind on modules, which is to be the same for all of them."""

    def __init__(self) -> None:
        self._first: dict[str, list[Any]] | None = None

    def differs(self, changes: Iterable[tuple[str, Any, bool]]) -> str | None:
        """Returns the name of what these leave and the first ones did not."""
        by_name: dict[str, list[Any]] = {}
        for name, value, _ in changes:
            leaves = list(leaves_of(value, modules=True))
            if any(map(is_opaque, leaves)):
                return name
            copies = [_copy_of(leaf, value) for leaf in leaves]
            by_name.setdefault(name, []).extend(copies)
        if self._first is None:
            self._first = by_name
        for name in {**self._first, **by_name}:
            if not are_all_same(by_name.get(name, []), self._first.get(name, [])):
                return name
        return None


def _copy_of(leaf: Any, value: object) -> Any:
    """Returns a copy of a tensor that a change may be of, or the leaf itself."""
    # A parameter that something holds is not what was written to.
    is_held = isinstance(leaf, nn.Parameter) and leaf is not value
    if not isinstance(leaf, T) or is_held or compared_entries(leaf) is None:
        return leaf
    return leaf.detach().clone()


def line_that_sets(modules: Iterable[nn.Module], name: str) -> str:
    """Returns where the code of a module sets an attribute, to be read; or ``""``."""
    attribute = name.rpartition(".")[2]
    pattern = rf"\.{attribute}\b(\[.*\])?(\.\w+\(|\s*\S?=[^=])"
    # A dict, as a set has no order, and the first class is to be told.
    for kind in dict.fromkeys(map(type, modules)):
        try:
            lines, first = inspect.getsourcelines(kind)
            path = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        method = ""
        for number, line in enumerate(lines, start=first):
            if line.lstrip().startswith("def "):
                method = line
            if re.search(pattern, line) and "__init__" not in method:
                return f' ("{line.strip()}", line {number} of {path})'
    return ""
