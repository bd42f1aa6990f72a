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
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from opacus_ext.grad_sample.adapter.objects import (
    CONTAINERS,
    GONE,
    QUICK,
    are_equal,
    attributes_of,
    entries_of,
    flat,
    have_same_entries,
    have_same_keys,
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
_HOOKS = {n for n, x in vars(nn.Module()).items() if "hook" in n and x == {}}
_PARTS = {"_parameters", "_buffers", "_modules"} | _HOOKS
_HELD = (T, nn.Module, torch.Generator)
# Attributes that a class sets but does not read in training: here the last state of a
# scan, for decoding. A class of the user names its own in ``transient``.
_TRANSIENT = {"RecurrentGemmaRglru": ("recurrent_states",)}  # of transformers


class Change(NamedTuple):
    """
    A change by a forward: a name and the new value. It is hidden if a tensor was
    written to without a new version, as by the kernel of BatchNorm.
    """

    name: str
    value: Any
    hidden: bool = False


class _Place(NamedTuple):
    """The attributes of an object, or a container."""

    name: str
    value: Any
    is_named: bool  # True if its keys are attributes
    is_compared: bool = True  # False for dicts of hooks


class State:
    """What the modules of a model, or another object, hold."""

    def __init__(self, root: Any):
        self.root = root
        self._collect()

    def __deepcopy__(self, memo: dict) -> State:
        memo[id(self)] = new = State(None)
        new.root = deepcopy(self.root, memo)
        new._stale = True  # walked later, when the copy is complete
        return new

    def _collect(self) -> None:
        """Collects all modules, tensors and containers."""
        self.modules: list[nn.Module] = []
        self._tensors: dict[int, tuple[str, T]] = {}
        self._generators: dict[str, torch.Generator] = {}
        places: list[_Place] = []
        todo, seen = deque([("", self.root)]), set[int]()
        while todo:
            name, root = todo.popleft()
            if id(root) in seen:
                continue
            seen.add(id(root))
            if isinstance(root, nn.Module):
                self.modules.append(root)
            attributes = list(_attributes(name, root, root is self.root))
            if attributes and id(attributes[-1].value) in seen:
                attributes.pop()  # the class
            seen.update(id(place.value) for place in attributes)
            held = [item for place in attributes for item in _entries_in(place)]
            for name, value in held:
                if isinstance(value, T):
                    self._tensors.setdefault(id(value), (name, value))
                elif isinstance(value, nn.Module):
                    todo.append((name, value))
                elif isinstance(value, torch.Generator) and is_own(value):
                    self._generators[name] = value
                elif id(value) not in seen and is_looked_into(value):
                    seen.add(id(value))
                    of_it = [_Place(name, x, False) for x in _containers_of(value)]
                    inside = [item for place in of_it for item in _entries_in(place)]
                    held += [(n, x) for n, x in inside if isinstance(x, _HELD)]
                    places += of_it
            places += attributes
        self._transient = []
        for module in self.modules:
            names = _TRANSIENT.get(type(module).__name__, ())
            names = getattr(module, "transient", names)
            if names:
                self._transient.append((vars(module), names))
        self._forget_transient()
        # They share memory with parameters, until these get other memory.
        self._held = [x for _, x in self._tensors.values()]
        self._first = dict(zip(self._tensors, map(T.detach, self._held)))
        self._others = [x for x in self._held if not isinstance(x, nn.Parameter)]
        self._before = [(place, dict(entries_of(place.value))) for place in places]
        # True if there are objects other than modules, tensors and containers.
        kinds = {type(place.value).__module__ for place in places if not place.is_named}
        self.has_objects = bool(kinds - {"builtins", "collections"})
        values = [place.value for place in places]
        self._empty = [x for x in values if _is_plainly_empty(x)]
        # What a tuple holds can't be replaced.
        others = [x for x in values if type(x) is not tuple]
        self._full = [x for x in others if not _is_plainly_empty(x)]
        self._flat = flat(self._full)
        self._stale = False

    def holds(self, x: T) -> bool:
        """Returns True for a tensor that was held in the beginning."""
        return id(x) in self._tensors and self._tensors[id(x)][1] is x

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
        self._random = [(n, g, g.get_state()) for n, g in self._generators.items()]
        self._streams = [*map(Stream, torch_generators())]
        self._copies: dict[int, T | None] = {}
        for x in self._held if parameters else self._others:
            self.reach(x)

    def reach(self, x: T) -> None:
        """Copies a tensor whose data may be written without a new version."""
        if id(x) in self._tensors and id(x) not in self._copies:
            view = compared_entries(x)
            self._copies[id(x)] = None if view is None else view.clone()

    def changes(self, compare: bool = True) -> list[Change]:
        """
        Returns changes since :meth:`remember`. Without ``compare`` only tensors that
        seem to be written are compared: each comparison waits for the device.
        """
        self._forget_transient()
        found = []
        for (name, _, is_named, is_compared), now, old in self._replaced():
            for key in {**old, **now} if is_compared else ():
                new = now.get(key, GONE)
                if are_equal(new, old.get(key, GONE)) or is_named and _is_skipped(key):
                    continue
                change = (_join(name, key), new) if is_named else (name, (key, new))
                found.append(Change(*change))
            if is_compared and not is_named and now.keys() == old.keys():
                found += [] if have_same_keys(now, old) else [Change(name, tuple(now))]
        for name, generator, state in self._random:
            if not torch.equal(generator.get_state(), state):
                found.append(Change(name, generator.get_state()))
        return found + [Change(name, x, h) for name, x, h in self._rewritten(compare)]

    def restore(self) -> str | None:
        """
        Restores everything, and torch's generators for another sample; returns the name
        of a value that it can't restore.
        """
        self._forget_transient()
        for _, generator, state in self._random:
            generator.set_state(state)
        for stream in self._streams:
            stream.begin_anew()
        lost: str | None = None
        for (name, value, *_), _, old in self._replaced():
            if not put_back(value, old):
                lost = name
        for name, x, _ in self._rewritten():
            copy = self._copies.get(id(x))
            if copy is None or copy.shape != x.shape:
                lost = name
            else:
                with torch.no_grad():
                    x.copy_(copy)
        self._marks = _marks(self._held)
        return lost

    def held_now(self) -> Callable[[], None]:
        """Returns a function that brings the changes of now back after a restore."""
        entries = [(place.value, dict(now)) for place, now, _ in self._replaced()]
        tensors = [(x, x.detach().clone()) for _, x, _ in self._rewritten()]
        numbers = [(g, g.get_state()) for g in self._generators.values()]

        @torch.no_grad()
        def bring_back() -> None:
            for value, items in entries:
                put_back(value, items)
            for x, copy in tensors:
                x.copy_(copy)
            for generator, state in numbers:
                generator.set_state(state)

        return bring_back

    def _forget_transient(self) -> None:
        for attributes, names in self._transient:
            attributes.update(dict.fromkeys(names))

    def _has_replaced(self) -> bool:
        """Returns False if each container holds the very objects of before."""
        if any(self._empty):
            return True
        now = flat(self._full)
        return len(now) != len(self._flat) or not all(map(is_, now, self._flat))

    def _replaced(self) -> Iterable[tuple[_Place, Mapping, dict]]:
        """Returns containers that have changed, with their new and old entries."""
        if not self._has_replaced():
            return []
        every = ((place, entries_of(place.value), old) for place, old in self._before)
        return [found for found in every if not have_same_entries(*found[1:])]

    def _rewritten(self, compare: bool = True) -> Iterator[tuple[str, T, bool]]:
        """Yields changed tensors: name, tensor, and True if hidden."""
        now, copied = _marks(self._held), self._copies
        for (key, (name, x)), mark, new in zip(self._tensors.items(), self._marks, now):
            if new == mark and key not in copied:
                continue
            copy = self._copies.get(key)
            # Adding and removing a parametrization sets a frozen parameter to itself.
            is_parameter, moved = isinstance(x, nn.Parameter), new[1] != mark[1]
            wrote = moved or new != mark and (not is_parameter or x.requires_grad)
            if moved and is_parameter and self._is_cast(x):
                self._stale = True
                continue
            if copy is not None and (wrote or compare or is_parameter):
                wrote = not holds_still(x, copy) or wrote and copy.shape != x.shape
            if wrote:
                yield name, x, new[0] == mark[0] and not is_parameter

    def _is_cast(self, x: T) -> bool:
        """Returns True if a parameter has the numbers of before in another dtype."""
        first = self._first[id(x)]
        return x.dtype != first.dtype and have_same_bits(first.to(x.dtype), x.detach())


def _attributes(name: str, x: Any, is_root: bool) -> Iterator[_Place]:
    """Yields the attributes of a module, or another root, and those of its class."""
    if inspect.ismethod(x):
        x = x.__self__
    kind: Any = type(x)
    if isinstance(x, nn.Module):
        yield _Place(name, vars(x), True)
        for part in _PARTS.intersection(vars(x)):
            # Whole parameters replace those of FSDP, and back.
            if part != "_parameters" or not hasattr(x, "_is_fsdp_managed_module"):
                yield _Place(
                    name, vars(x)[part], part not in _HOOKS, part not in _HOOKS
                )
        if issubclass(kind, FSDPModule):  # made of the class below it
            kind = kind.__mro__[2]
    elif is_root:
        yield _Place(name, x, True)
    if kind.__module__.partition(".")[0] not in ("builtins", "torch"):
        yield _Place(kind.__name__, kind, True)


def _containers_of(x: Any) -> Iterator[Any]:
    """Yields an object, and the attributes of a list or dict that has some."""
    yield x
    attributes = attributes_of(x)
    if attributes is not None and isinstance(x, CONTAINERS):
        yield attributes


def _entries_in(place: _Place) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of what a container or object holds."""
    for key, value in list(entries_of(place.value).items()):
        skipped = place.is_named and (key in _PARTS or _is_skipped(key))
        if inspect.ismethod(value):
            value = value.__self__
        if type(value) not in QUICK and not skipped:
            yield _join(place.name, key) if place.is_named else place.name, value


def _marks(tensors: Sequence[T]) -> list[tuple[int, int]]:
    """Returns the versions and addresses of tensors."""
    try:
        addresses = [*map(T.data_ptr, tensors)]
    except RuntimeError:  # of one that has no address
        is_plain = [x.layout is torch.strided for x in tensors]
        addresses = [x.data_ptr() if y else 0 for x, y in zip(tensors, is_plain)]
    return [*zip(map(attrgetter("_version"), tensors), addresses)]


def _is_plainly_empty(x: Any) -> bool:
    return (isinstance(x, dict) or type(x) in (list, set, deque)) and not x


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_skipped(key: Any) -> bool:
    name = str(key)
    dunder = name.startswith("__") and name.endswith("__")
    return dunder or key in _SKIPPED or name.startswith("_opacus_ext")
