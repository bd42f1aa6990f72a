"""What the modules of a model hold, compared after a forward and restored.

A forward that stores data on a module would carry it to a later forward without noise.
So the attributes of all modules are compared with those before, and so is what their
lists, dicts and other objects hold, one level deep. What lies deeper is not looked at
(docs/explanation/unseen.md). No op is followed for it: under vmap a tensor that is made
of data is batched, and samples that run one by one leave different values.
"""

from __future__ import annotations

import inspect
from collections import deque
from copy import deepcopy
from operator import attrgetter, is_
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from opacus_ext.grad_sample.adapter.objects import (
    CONTAINERS,
    GONE,
    QUICK,
    are_all_same,
    are_equal,
    attributes_of,
    entries_of,
    flat,
    have_same_entries,
    is_looked_into,
    put_back,
)
from opacus_ext.grad_sample.core.generators import (
    Stream,
    is_own,
    torch_generators,
)
from opacus_ext.grad_sample.core.values import (
    compared_entries,
    have_same_bits,
    holds_still,
)

T = torch.Tensor

# Attributes that are skipped: of torch's recurrent layers, Opacus, Lightning.
_SKIPPED = {"_flat_weights", "_flat_weight_refs", "_compiled_call_impl", "_trainer"}
_SKIPPED |= {"max_batch_len", "autograd_grad_sample_hooks", "_fabric"}
_SKIPPED.add("_non_persistent_buffers_set")
_HOOKS = {name for name, x in vars(nn.Module()).items() if "hook" in name and x == {}}
_PARTS = {"_parameters", "_buffers", "_modules"} | _HOOKS
_HELD = (T, nn.Module, torch.Generator)
_BUILT_IN = ("builtins", "collections")  # modules that define containers
# Attributes that a class sets but does not read in training: here the last state of a
# scan, for decoding, in transformers. A class of the user names its own in
# ``transient``.
_TRANSIENT = {"RecurrentGemmaRglru": ("recurrent_states",)}


class Change(NamedTuple):
    """
    A change by a forward: a name and the new value. It is hidden if a tensor was
    written to without a new version, as by the kernel of BatchNorm.
    """

    name: str
    value: Any
    hidden: bool = False


class _Holder(NamedTuple):
    """The attributes of an object, or a container."""

    name: str
    value: Any
    is_named: bool  # True if its keys are attributes
    is_compared: bool = True  # False for dicts of hooks


class State:
    """What the modules of a model, or another object, hold."""

    def __init__(self, root: object):
        self.root = root
        self._collect()

    def __deepcopy__(self, memo: dict) -> State:
        memo[id(self)] = copied = State(None)
        copied.root = deepcopy(self.root, memo)
        # What it holds may not be copied yet: it is walked when it is needed.
        copied._stale = True
        return copied

    def _collect(self) -> None:
        """Collects all modules, tensors and containers."""
        walk = _Walk(self.root)
        self.modules = walk.modules
        self._tensors = walk.tensors
        self._generators = walk.generators
        # None of them is compared: they are None before and after each forward.
        self._transient = []
        for module in self.modules:
            names = _TRANSIENT.get(type(module).__name__, ())
            names = getattr(module, "transient", names)
            if names:
                self._transient.append((vars(module), names))
        self._forget_transient()
        self._held = [tensor for _, tensor in self._tensors.values()]
        # They share memory with parameters, until these get other memory.
        self._first = dict(zip(self._tensors, map(T.detach, self._held)))
        self._others = [x for x in self._held if not isinstance(x, nn.Parameter)]
        self._before = []
        self._empty: list[Any] = []
        self._full: list[Any] = []
        # True if there are objects other than modules, tensors and containers.
        self.has_objects = False
        for holder in walk.holders:
            container = holder.value
            kind = type(container)
            self._before.append((holder, dict(entries_of(container))))
            if not holder.is_named and kind.__module__ not in _BUILT_IN:
                self.has_objects = True
            if _is_plainly_empty(container):
                self._empty.append(container)
            # What a tuple holds can't be replaced.
            elif kind is not tuple:
                self._full.append(container)
        self._flat = flat(self._full)
        self._stale = False

    def holds(self, tensor: T) -> bool:
        """Returns True for a tensor that was held in the beginning."""
        key = id(tensor)
        return key in self._tensors and self._tensors[key][1] is tensor

    # -- before and after --------------------------------------------------------------

    def remember(self, parameters: bool = False) -> None:
        """
        Copies everything for a later comparison; parameters only with ``parameters``,
        or where :meth:`reach` is called.
        """
        self._forget_transient()
        if self._stale or self._has_replaced():
            self._collect()
        self._marks = _marks(self._held)
        self._random = []
        for name, generator in self._generators.items():
            self._random.append((name, generator, generator.get_state()))
        self._streams = [*map(Stream, torch_generators())]
        self._copies: dict[int, T | None] = {}
        for tensor in self._held if parameters else self._others:
            self.reach(tensor)

    def reach(self, tensor: T) -> None:
        """Copies a tensor whose data may be written without a new version."""
        key = id(tensor)
        if key in self._tensors and key not in self._copies:
            entries = compared_entries(tensor)
            self._copies[key] = None if entries is None else entries.clone()

    def changes(self, compare: bool = True) -> list[Change]:
        """
        Returns changes since :meth:`remember`. Without ``compare`` only tensors that
        seem to be written are compared: each comparison waits for the device.
        """
        self._forget_transient()
        changes: list[Change] = []
        for holder, now, old in self._replaced():
            if holder.is_compared:
                changes += _changes_in(holder, now, old)
        for name, generator, numbers in self._random:
            if not torch.equal(generator.get_state(), numbers):
                changes.append(Change(name, generator.get_state()))
        changes += self._rewritten(compare)
        return changes

    def restore(self) -> str | None:
        """
        Restores everything, and torch's generators for another sample; returns the name
        of a value that it can't restore.
        """
        self._forget_transient()
        for _, generator, numbers in self._random:
            generator.set_state(numbers)
        for stream in self._streams:
            stream.begin_anew()
        lost: str | None = None
        for holder, _, old in self._replaced():
            if not put_back(holder.value, old):
                lost = holder.name
        for name, tensor, _ in self._rewritten():
            copy = self._copies.get(id(tensor))
            if copy is None or copy.shape != tensor.shape:
                lost = name
                continue
            with torch.no_grad():
                tensor.copy_(copy)
        self._marks = _marks(self._held)
        return lost

    def held_now(self) -> Callable[[], None]:
        """Returns a function that brings the changes of now back after a restore."""
        entries = [(holder.value, dict(now)) for holder, now, _ in self._replaced()]
        tensors = [(x, x.detach().clone()) for _, x, _ in self._rewritten()]
        generators = self._generators.values()
        numbers = [(generator, generator.get_state()) for generator in generators]

        @torch.no_grad()
        def bring_back() -> None:
            for container, items in entries:
                put_back(container, items)
            for tensor, copy in tensors:
                tensor.copy_(copy)
            for generator, state in numbers:
                generator.set_state(state)

        return bring_back

    def _forget_transient(self) -> None:
        for attributes, names in self._transient:
            attributes.update(dict.fromkeys(names))

    def _has_replaced(self) -> bool:
        """Returns False if each container holds the very objects of before."""
        # Most containers are empty, for hooks: one call asks all of them.
        if any(self._empty):
            return True
        now = flat(self._full)
        return len(now) != len(self._flat) or not all(map(is_, now, self._flat))

    def _replaced(self) -> list[tuple[_Holder, Mapping, dict]]:
        """Returns containers that have changed, with their new and old entries."""
        changed: list[tuple[_Holder, Mapping, dict]] = []
        if not self._has_replaced():
            return changed
        # All are found before any is put back.
        for holder, old in self._before:
            now = entries_of(holder.value)
            if not have_same_entries(now, old):
                changed.append((holder, now, old))
        return changed

    def _rewritten(self, compare: bool = True) -> Iterator[Change]:
        """Yields the tensors that were written to."""
        marks = zip(self._marks, _marks(self._held))
        for (key, (name, tensor)), (old, new) in zip(self._tensors.items(), marks):
            if new == old and key not in self._copies:
                continue
            (old_version, old_address), (new_version, new_address) = old, new
            is_parameter = isinstance(tensor, nn.Parameter)
            wrote = moved = new_address != old_address
            # A model may keep its parameters in another dtype: that holds no data.
            if moved and is_parameter and self._is_cast(tensor):
                self._stale = True
                continue
            # Adding and removing a parametrization sets a frozen parameter to itself.
            if not is_parameter or tensor.requires_grad:
                wrote = new != old
            copy = self._copies.get(key)
            if copy is not None and (wrote or compare or is_parameter):
                other_shape = wrote and copy.shape != tensor.shape
                wrote = other_shape or not holds_still(tensor, copy)
            # A kernel that writes without a new version was not seen by autograd.
            if wrote:
                is_hidden = new_version == old_version and not is_parameter
                yield Change(name, tensor, is_hidden)

    def _is_cast(self, parameter: T) -> bool:
        """Returns True if a parameter has the numbers of before in another dtype."""
        first = self._first[id(parameter)]
        if parameter.dtype == first.dtype:
            return False
        return have_same_bits(first.to(parameter.dtype), parameter.detach())


def _changes_in(holder: _Holder, now: Mapping, old: Mapping) -> Iterator[Change]:
    """Yields the changes of a container, given its new and old entries."""
    for key in {**old, **now}:
        new = now.get(key, GONE)
        if are_equal(new, old.get(key, GONE)):
            continue
        if not holder.is_named:
            yield Change(holder.name, (key, new))
        elif not _is_skipped(key):
            yield Change(_join(holder.name, key), new)
    # Code can tell the order of keys, and keys that only call themselves equal.
    if not holder.is_named and now.keys() == old.keys() and not are_all_same(now, old):
        yield Change(holder.name, tuple(now))


class _Walk:
    """
    A walk over a root and all modules in it.

    Attributes:
        modules: of the root
        tensors: on modules, or one level below, with their names, by id
        generators: by name
        holders: containers, whose entries are compared
    """

    def __init__(self, root: object):
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, tuple[str, T]] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.holders: list[_Holder] = []
        self._seen: set[int] = set()
        self._todo: deque[tuple[str, Any]] = deque([("", root)])
        while self._todo:
            name, owner = self._todo.popleft()
            if id(owner) not in self._seen:
                self._visit(name, owner, owner is root)

    def _visit(self, name: str, owner: object, is_root: bool) -> None:
        self._seen.add(id(owner))
        if isinstance(owner, nn.Module):
            self.modules.append(owner)
        attributes = list(_attributes(name, owner, is_root))
        # The last one may be a class, which several modules have.
        if attributes and id(attributes[-1].value) in self._seen:
            attributes.pop()
        self._seen.update(id(holder.value) for holder in attributes)
        entries: list[tuple[str, Any]] = []
        for holder in attributes:
            entries += _entries_in(holder)
        # The list grows while it is read, by what its objects hold.
        for name, value in entries:
            if isinstance(value, T):
                self.tensors.setdefault(id(value), (name, value))
            elif isinstance(value, nn.Module):
                self._todo.append((name, value))
            elif isinstance(value, torch.Generator) and is_own(value):
                self.generators[name] = value
            elif id(value) not in self._seen and is_looked_into(value):
                self._seen.add(id(value))
                entries += self._entries_below(name, value)
        self.holders += attributes

    def _entries_below(self, name: str, value: object) -> Iterator[tuple[str, Any]]:
        """Adds an object to the holders; yields what is one level below a module."""
        for container in _containers_of(value):
            holder = _Holder(name, container, False)
            self.holders.append(holder)
            for entry in _entries_in(holder):
                if isinstance(entry[1], _HELD):
                    yield entry


def _attributes(name: str, owner: object, is_root: bool) -> Iterator[_Holder]:
    """Yields the attributes of a module, or another root, and those of its class."""
    if inspect.ismethod(owner):
        owner = owner.__self__
    kind: Any = type(owner)
    if isinstance(owner, nn.Module):
        attributes = vars(owner)
        yield _Holder(name, attributes, True)
        for part in _PARTS.intersection(attributes):
            # Whole parameters replace those of FSDP, and back.
            if part == "_parameters" and hasattr(owner, "_is_fsdp_managed_module"):
                continue
            is_state = part not in _HOOKS
            yield _Holder(name, attributes[part], is_state, is_state)
        # FSDP derives its class from the user's, which is the second below it.
        if issubclass(kind, FSDPModule):
            kind = kind.__mro__[2]
    elif is_root:
        yield _Holder(name, owner, True)
    if kind.__module__.partition(".")[0] not in ("builtins", "torch"):
        yield _Holder(kind.__name__, kind, True)


def _containers_of(value: object) -> Iterator[Any]:
    """Yields an object, and the attributes of a list or dict that has some."""
    yield value
    # The entries of a list or dict are not its attributes.
    attributes = attributes_of(value)
    if attributes is not None and isinstance(value, CONTAINERS):
        yield attributes


def _entries_in(holder: _Holder) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of what a container or object holds."""
    for key, value in list(entries_of(holder.value).items()):
        name = holder.name
        if holder.is_named:
            if key in _PARTS or _is_skipped(key):
                continue
            name = _join(name, key)
        # A bound method of an object holds what the object does.
        if inspect.ismethod(value):
            value = value.__self__
        if type(value) not in QUICK:
            yield name, value


def _marks(tensors: Sequence[T]) -> list[tuple[int, int]]:
    """Returns the versions and addresses of tensors."""
    try:
        addresses = [*map(T.data_ptr, tensors)]
    # One of them has no address; asking each of them first takes longer.
    except RuntimeError:
        addresses = [*map(_address_of, tensors)]
    return [*zip(map(attrgetter("_version"), tensors), addresses)]


def _address_of(tensor: T) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _is_plainly_empty(value: object) -> bool:
    if isinstance(value, dict) or type(value) in (list, set, deque):
        return not value
    return False


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_skipped(key: object) -> bool:
    name = str(key)
    is_of_python = name.startswith("__") and name.endswith("__")
    return is_of_python or key in _SKIPPED or name.startswith("_opacus_ext")
