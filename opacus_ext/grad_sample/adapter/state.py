"""What a forward leaves on modules: compared at each call, and put back.

A private model is a function of its inputs, parameters, buffers and random numbers. A
forward that keeps something of its data for the next would carry it there without
noise. So what modules hold is compared before and after, by identity, value and
version; containers and plain objects on modules are looked into.
"""

from __future__ import annotations

import inspect
from collections import deque
from copy import deepcopy
from typing import (
    Any,
    Container,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

import numpy as np
import torch
from torch import nn

from opacus_ext.grad_sample.core.vmap import is_batched

T = torch.Tensor

# What every module has: hooks and registries of its parts, which torch itself changes.
_OWN = set(vars(nn.Module())) | {"autograd_grad_sample_hooks"}  # Opacus's
_AROUND = _OWN | {"_flat_weights", "_flat_weight_refs", "_trainer", "_fabric"}
_HOOKS = {name for name in _OWN if "hook" in name} | {"_compiled_call_impl"}
_HOOKS.add("max_batch_len")  # of Opacus's recurrent layers, for packed sequences
_HOOKS |= {"_flat_weights", "_flat_weight_refs"}  # of torch's, of the weights there are
_PARTS = ("_parameters", "_buffers", "_modules")
_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
    *(torch.layout, torch.memory_format, np.generic),
)
# The same of others: here the last state of a scan, which decoding alone goes on from.
_TRANSIENT = {"RecurrentGemmaRglru": ("recurrent_states",)}  # of transformers
_QUICK = {int, float, bool, str, type(None)}  # of these, the most
_MANY = 10_000  # entries beyond which containers and tensors are not looked into
_GONE = object()


class Change(NamedTuple):
    """
    Something that a forward has left.

    Attributes:
        name: of the attribute, with the module's
        value: that it has now
        in_place: whether the same object holds something else
        hidden: whether that was a kernel that leaves the version as it is, as that of
            BatchNorm does for its running statistics
    """

    name: str
    value: Any
    in_place: bool
    hidden: bool = False


class State:
    """
    What some modules, or one other object, hold.

    Args:
        root: a module, or any object
    """

    def __init__(self, root: Any):
        self.root = root
        self._copied: Set[int] = set()  # large ones that have changed in place
        self._look()

    def __deepcopy__(self, memo: dict) -> State:
        new = State(None)  # what there is in a copy is found when it is whole
        memo[id(self)] = new
        new.root = deepcopy(self.root, memo)
        return new

    def _look(self) -> None:
        """Finds what there is to compare."""
        self._places: List[Tuple[str, Dict[str, Any]]] = []
        modules: Dict[str, Any] = (
            {"": self.root} if hasattr(self.root, "__dict__") else {}
        )
        if isinstance(self.root, nn.Module):
            modules = dict(self.root.named_modules())
        for name, module in modules.items():
            self._places.append((name, vars(module)))
            if isinstance(module, nn.Module):
                self._places += [(name, vars(module)[part]) for part in _PARTS]
        self._modules = list(modules.values())
        self._places += [
            (cls.__name__, cls.__dict__)
            for cls in {type(m): None for m in self._modules}
            if not cls.__module__.startswith("torch.")
        ]
        transient = [(vars(m), _transient_of(type(m))) for m in self._modules]
        self._transient = [(place, names) for place, names in transient if names]
        tensors: Dict[int, T] = {}
        objects: Dict[int, Tuple[str, Any]] = {}
        self._hooks: List[Dict] = []
        for name, place in self._places:
            for key, value in place.items():
                if isinstance(value, T):
                    tensors[id(value)] = value
                elif key in _HOOKS and isinstance(value, dict):
                    self._hooks.append(value)
                elif key not in _AROUND and not key.startswith(("_opacus_ext", "__")):
                    if id(value) not in objects and _is_mutable(value):
                        objects[id(value)] = _join(name, key), value
        self.tensors, self._objects = list(tensors.values()), list(objects.values())

    @property
    def has_objects(self) -> bool:
        """Whether there is something that :meth:`restore` can't put back."""
        return bool(self._objects)

    def remember(self) -> None:
        """What is there now is what is compared with."""
        self._forget_transient()
        places = [place for _, place in self._places]
        if not _equal(places, getattr(self, "_before", ())):
            self._look()
        self._before = [dict(place) for _, place in self._places]
        self._written: Set[int] = set()
        self._kinds = [type(module) for module in self._modules]
        self._versions = [(x._version, x.data_ptr()) for x in self.tensors]
        self._flags = [x.requires_grad for x in self.tensors]
        self._contents = [_content(value) for _, value in self._objects]
        self._kept = [_copy(value) for _, value in self._objects]
        self._hooked = [list(hooks.items()) if hooks else [] for hooks in self._hooks]
        self._copies, self._probes = {}, {}
        for x in self.tensors:
            if id(x) in self._copied:
                self._copies[id(x)] = x.detach().clone()
            elif not isinstance(x, nn.Parameter):
                small = x.numel() <= _MANY
                kept = self._copies if small else self._probes
                kept[id(x)] = x.detach().clone() if small else _probe(x)

    def changes(self, written: Container[int] = ()) -> List[Change]:
        """
        What has changed since :meth:`remember`. What modules call transient, which they
        set for what is around them and never read, is taken away.

        Args:
            written: where memory begins that was written to
        """
        self._forget_transient()
        self._written |= set(written)
        found = list(self._replaced())
        changed = dict(self._changed_in_place(self._written))
        for name, place in self._places if changed else ():
            for key, x in place.items():
                if id(x) in changed:
                    found.append(Change(_join(name, key), x, True, changed[id(x)]))
        for (name, value), content in zip(self._objects, self._contents):
            if not _equal(_content(value), content):
                found.append(Change(name, value, True))
        return found

    def _forget_transient(self) -> None:
        for place, names in self._transient:
            place.update(dict.fromkeys(names))

    def _changed_in_place(self, written: Container[int]) -> Iterator[Tuple[int, bool]]:
        """Tensors by their ids, and whether their version is the same."""
        for x, (version, place) in zip(self.tensors, self._versions):
            copy = self._copies.get(id(x))
            if copy is not None:
                if x.shape != copy.shape or not torch.equal(x, copy):
                    yield id(x), x._version == version
                continue
            probe = self._probes.get(id(x))
            same = probe is None or torch.equal(_probe(x), probe)
            moved = x.data_ptr() != place
            wrote = moved or bool(written) and memory(x) in written
            if not same or wrote or x._version != version:
                self._copied.add(id(x))
                # A parametrization that comes and goes sets a parameter to itself.
                if wrote or not isinstance(x, nn.Parameter):
                    yield id(x), moved or not same and x._version == version

    def _replaced(self) -> Iterator[Change]:
        """Attributes that are others than before."""
        if _equal([place for _, place in self._places], self._before):
            return
        for (name, place), before in zip(self._places, self._before):
            for key in {**before, **place}:
                new, old = place.get(key, _GONE), before.get(key, _GONE)
                if key in _HOOKS or key.startswith("__"):
                    continue
                if not _equal([new], [old]):
                    yield Change(_join(name, key), new, False)

    def restore(self) -> Optional[str]:
        """
        Puts back what was there at :meth:`remember`.

        Returns:
            the name of what can't be put back; None if all is as it was
        """
        lost = None
        for (_, value), content, kept in zip(self._objects, self._contents, self._kept):
            if not _equal(_content(value), content):
                _put_back(value, kept)
        for hooks, kept in zip(self._hooks, self._hooked):
            if list(hooks.items()) != kept:
                _put_back(hooks, kept)
        for change in self.changes():
            copy = self._copies.get(id(change.value))
            if change.in_place and copy is not None:
                with torch.no_grad():
                    change.value.copy_(copy)
            elif change.in_place:
                lost = change.name
        for x, (version, _) in zip(self.tensors, self._versions):
            if x.requires_grad and x._version != version and x.is_leaf:
                lost = f"a parameter of shape {tuple(x.shape)} in place"
        for x, flag in zip(self.tensors, self._flags):
            if x.requires_grad != flag:
                x.requires_grad_(flag)
        for module, kind in zip(self._modules, self._kinds):
            if type(module) is not kind:
                module.__class__ = kind
        for (name, place), before in zip(self._places, self._before):
            if _equal([place], [before]):
                continue
            if isinstance(place, dict):
                place.clear()
                place.update(before)
            else:
                lost = f"class {name}"
        self._versions = [(x._version, x.data_ptr()) for x in self.tensors]
        return lost


def _copy(value: Any) -> Any:
    """What :func:`_put_back` needs; None if it can do nothing."""
    if isinstance(value, (dict, list, set, deque)):
        return list(value.items()) if isinstance(value, dict) else list(value)
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _put_back(value: Any, kept: Any) -> None:
    """Gives a container or an object the items that it had."""
    if isinstance(kept, dict):
        value, kept = vars(value), kept.items()
    if kept is not None:
        value.clear()
        add = value.update if isinstance(value, (dict, set)) else value.extend
        add(kept)


def _transient_of(kind: type) -> Tuple[str, ...]:
    """What a class says that it sets and never reads in training."""
    return getattr(kind, "transient", _TRANSIENT.get(kind.__name__, ()))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _equal(new: Any, old: Any) -> bool:
    """Whether two lists hold the same objects, or equal plain ones."""
    try:
        return new == old  # the same object is equal to itself, whatever it is
    except Exception:  # tensors and arrays, which are not equal or unequal
        return False


def _is_mutable(value: Any) -> bool:
    """Whether something on a module may hold something else later."""
    if isinstance(value, (list, dict, set, deque, np.ndarray, bytearray)):
        return True
    if isinstance(value, tuple):
        return any(isinstance(x, T) or _is_mutable(x) for x in value)
    if isinstance(value, (T, *_PLAIN)) or _is_ours(value):
        return False
    return bool(getattr(value, "__dict__", None)) or hasattr(type(value), "__slots__")


def _is_ours(value: Any) -> bool:
    """Whether something trains the model: a private criterion, set on it."""
    return type(value).__module__.partition(".")[0] in ("opacus", "opacus_ext")


def _content(value: Any) -> List[Any]:
    """What an object holds, as a flat list."""
    found: List[Any] = []
    _flatten(value, found, set())
    return found


def _flatten(value: Any, found: List[Any], seen: Set[int]) -> None:
    if type(value) in _QUICK or isinstance(value, _PLAIN):
        found.append(value)
        return
    if isinstance(value, T):
        found += [value, value._version, _bytes(value)]
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        found.append(value.tobytes())
        return
    if isinstance(value, (list, tuple, deque, set, frozenset, np.ndarray)):
        items, size = value, len(value)
    elif isinstance(value, dict):
        items, size = (x for pair in value.items() for x in pair), len(value)
    elif isinstance(value, bytearray):
        items, size = (), bytes(value)
    else:
        items, size = _attributes(value), value
    found.append(size)
    if not isinstance(size, int) or size <= _MANY:
        for x in items:
            _flatten(x, found, seen)


def _vars(value: Any) -> Dict[str, Any]:
    try:  # as quick for classes that look at each attribute that is asked for
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _attributes(value: Any) -> Iterator[Any]:
    yield from _vars(value).values()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name)


def tensors_in(value: Any) -> List[T]:
    """The tensors that an object holds, however deep."""
    return [x for x in _content(value) if isinstance(x, T)]


def _bytes(x: T) -> bytes:
    """Some entries of a tensor that an object holds."""
    if is_batched(x) or x.layout is not torch.strided or x.is_meta:
        return b""
    return _probe(x).cpu().view(torch.uint8).numpy().tobytes()


def is_opaque(value: Any) -> bool:
    """Whether an object holds something that can't be looked into."""
    return any(
        not isinstance(x, (T, bytes, *_PLAIN))
        and not getattr(x, "__dict__", None)
        and not hasattr(type(x), "__slots__")
        and not (inspect.isroutine(x) and getattr(x, "__closure__", None) is None)
        for x in _content(value)
        if x is not _GONE
    )


def _probe(x: T) -> T:
    """Some entries of a large tensor."""
    return x.detach().flatten()[:: x.numel() // 1000 or 1].clone()


def memory(x: T) -> int:
    """Where a tensor's memory begins, the same for its views."""
    return 0 if x.is_sparse else x.untyped_storage().data_ptr()
