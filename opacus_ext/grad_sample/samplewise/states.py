"""What a model's forward leaves on its modules, where its samples run in parts.

Each part finds the modules as they were before the first. What a run has made of data
and somebody keeps is remembered: a later forward that reads it would carry data from
batch to batch.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import types
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.ops import refuse_carried
from opacus_ext.grad_sample.samplewise.walk import tensors_in
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

# Of buffers, parameters, modules and hooks.
_TABLES = [name for name, x in vars(nn.Module()).items() if isinstance(x, dict)]
_NOT_STATE = frozenset(vars(nn.Module())) | {"forward"}

_CONTAINERS = (list, dict, set, deque)
_LIBRARIES = ("torch", "transformers", "opacus", "opacus_ext", "numpy", "peft")
_STANDARD = getattr(sys, "stdlib_module_names", ("builtins", "logging", "threading"))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


T = torch.Tensor
LeftByPart = Dict[Any, Any]  # by place, what a part left there


Tables = List[Tuple[dict, Dict[str, dict]]]


def tables_of(modules: List[nn.Module]) -> Tables:
    """Of each module its attributes, and copies of its tables that hold something."""
    found = []
    for m in modules:
        own = vars(m)
        found.append((own, {n: dict(own[n]) for n in _TABLES if own.get(n)}))
    return found


def restore(tables: Tables) -> None:
    """The tables as they were."""
    for own, kept in tables:
        for name in _TABLES:
            table = own.get(name)
            if table or name in kept:
                table.clear()
                table.update(kept.get(name, {}))


class Snapshot:
    """
    What modules and their code, hooks among it, can write to, to be put back:
    containers, objects and, with ``tensors``, the values of tensors.
    """

    def __init__(self, modules: List[nn.Module], tensors: bool):
        self.containers: Dict[int, Tuple[Any, Any]] = {}
        self.tensors: Dict[int, Tuple[T, T]] = {}
        self._clone = tensors
        seen: set = set()
        for m in modules:
            own = vars(m)
            for name, value in own.items():
                if name not in _NOT_STATE:
                    self.add(value)
            for buffer in m._buffers.values():
                self.add(buffer)
            forward = own.get("forward")  # the user's own is behind the engine
            self.function(getattr(forward, "own", forward), seen)
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                for hook in own[name].values():
                    self.function(getattr(hook, "hook", hook), seen)
        for kind in {type(m) for m in modules}:
            for base in kind.__mro__:
                for value in () if _is_library(base) else vars(base).values():
                    self.function(value, seen)

    def add(self, value: Any) -> None:
        """Whatever can be reached from a value, but for modules and parameters."""
        if id(value) in self.containers or isinstance(value, (nn.Module, nn.Parameter)):
            return
        if isinstance(value, T):
            if self._clone and id(value) not in self.tensors and not is_batched(value):
                self.tensors[id(value)] = value, value.detach().clone()
            return
        if isinstance(value, _CONTAINERS):
            self.containers[id(value)] = value, copy.copy(value)
            parts = value.values() if isinstance(value, dict) else value
            for part in list(parts):
                self.add(part)
        elif isinstance(value, tuple):
            for part in value:
                self.add(part)
        elif isinstance(getattr(value, "__dict__", None), dict) and not (
            callable(value) or _has_no_state(type(value))
        ):
            self.containers[id(value)] = value, dict(vars(value))
            for part in list(vars(value).values()):
                self.add(part)

    def function(self, function: Any, seen: set) -> None:
        """What a function of the user writes to: globals, closures, defaults."""
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not isinstance(function, types.FunctionType) or function in seen:
            return
        if _is_library(function):
            return
        seen.add(function)
        scope, names, codes = function.__globals__, set(), [function.__code__]
        while codes:
            code = codes.pop()
            names.update(code.co_names)
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        found = [scope[name] for name in names if name in scope]
        found += list(function.__defaults__ or ())
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for value in found:
            if isinstance(value, types.FunctionType):
                self.function(value, seen)
            elif not isinstance(value, (type, types.ModuleType)):
                self.add(value)

    def restore(self) -> None:
        """Everything is as it was."""
        for i, (_, kept) in self.containers.items():
            self.fill(i, kept)
        with torch.no_grad():
            for tensor, kept in self.tensors.values():
                if tensor.shape == kept.shape and not torch.equal(tensor, kept):
                    tensor.copy_(kept)

    def fill(self, i: int, kept: Any) -> None:
        """Makes the container with this id hold what another does."""
        value = self.containers[i][0]
        if not isinstance(value, _CONTAINERS):
            value = vars(value)
        if _same(value, kept):
            return  # some, that never change, refuse to be filled
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(kept)
        else:
            value.update(kept)

    def changed(self) -> Iterator[Tuple[int, Any]]:
        """What containers and objects hold, by id."""
        for i, (value, kept) in self.containers.items():
            own = value if isinstance(value, _CONTAINERS) else vars(value)
            if isinstance(own, (list, dict)) and not _same(own, kept):
                yield i, copy.copy(own)


def _same(own: Any, kept: Any) -> bool:
    """Whether a list or a dict holds the very same things, at the same places."""
    if isinstance(own, dict):
        own, kept = ([x for item in each.items() for x in item] for each in (own, kept))
    both = isinstance(own, list) and len(own) == len(kept)
    return both and all(a is b for a, b in zip(own, kept))


def _is_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] in _LIBRARIES


def _has_no_state(kind: type) -> bool:
    root = kind.__module__.split(".")[0]
    own = root in ("torch", "opacus_ext") or root in _STANDARD
    return own and not issubclass(kind, _NAMESPACES)


class States:
    """
    What modules keep.

    Args:
        engine: of the model
        values: whether what is changed in place is put back as well
    """

    def __init__(self, engine: "Engine", values: bool):
        self.engine = engine
        self.names, self.modules = engine.modules
        self.before = [dict(vars(m)) for m in self.modules]
        self.tables = tables_of(self.modules)
        self.values: Dict[int, Tuple[str, torch.Tensor, torch.Tensor, int]] = {}
        self.snapshot: Optional[Snapshot] = None
        if values:
            self.snapshot = Snapshot(self.modules, tensors=False)
            for name, x in self._tensors():
                self.values[id(x)] = name, x, x.detach().clone(), x._version
        self.after: List[LeftByPart] = []
        self._first: Dict[str, torch.Tensor] = {}

    def _tensors(self) -> Iterator[Tuple[str, torch.Tensor]]:
        for module, m, kept in zip(self.names, self.modules, self.before):
            for name, x in m._buffers.items():
                if x is not None:
                    yield f"buffer {module}.{name}".replace(" .", " "), x
            for name, value in kept.items():
                if name not in _NOT_STATE and not isinstance(value, nn.Parameter):
                    for x in tensors_in(value):
                        if not isinstance(x, nn.Parameter):
                            yield f"attribute {module}.{name}".replace(" .", " "), x

    def back(self) -> None:
        """Everything is as it was."""
        for m, kept in zip(self.modules, self.before):
            own = vars(m)
            if own.keys() != kept.keys():
                for name in set(own) - set(kept):
                    del own[name]
            own.update(kept)
        restore(self.tables)
        if self.snapshot is not None:
            self.snapshot.restore()
        with torch.no_grad():
            for _, x, value, version in self.values.values():
                if x._version != version:
                    x.copy_(value)

    def end(self) -> None:
        """After each part: what it left."""
        left: LeftByPart = {}
        for i, (m, kept) in enumerate(zip(self.modules, self.before)):
            for name, value in vars(m).items():
                if value is not kept.get(name, self) and name not in _NOT_STATE:
                    left[i, name] = value
        if self.snapshot is not None:
            left.update(self.snapshot.changed())
        for module, (own, kept) in zip(self.names, self.tables):
            for name, x in own["_buffers"].items():
                if x is not None and x is not kept.get("_buffers", {}).get(name):
                    self._changed(f"buffer {module}.{name}".replace(" .", " "), x)
        for name, x, _, version in self.values.values():
            if x._version != version:
                self._changed(name, x)
        self.after.append(left)

    def _changed(self, name: str, x: torch.Tensor) -> None:
        now = x.detach().clone()
        first = self._first.setdefault(name, now)
        same = first.shape == now.shape and torch.equal(first, now)
        if not same or (now.is_floating_point() and now.dim()):
            self.refuse(name)

    def refuse(self, name: str) -> None:
        """
        Raises:
            Refused: as ``name`` holds data
        """
        self.back()
        raise carries(self.engine, name)

    def common(self) -> List[LeftByPart]:
        """Of each part the tensors that all of them left, in the same places."""
        keys = [
            key
            for key in self.after[0]
            if _made_of_data([left.get(key) for left in self.after])
        ]
        return [{key: left[key] for key in keys} for left in self.after]

    def put(self, left: LeftByPart) -> None:
        """These, made of data, are what the modules keep."""
        for x in tensors_in(left):
            self.engine.made_of_data.add(x)
        for key, value in left.items():
            if isinstance(key, tuple):
                vars(self.modules[key[0]])[key[1]] = value
            else:
                self.snapshot.fill(key, value)

    def check(self) -> None:
        """
        Raises:
            Refused: if data of this batch have become a buffer
        """
        for name in data_in_buffers(self.engine):
            self.refuse(name)


def data_in_buffers(engine: "Engine") -> Iterator[str]:
    """The names of buffers that have become data of a batch, which are emptied."""
    for name, m in zip(*engine.modules):
        for key, x in m._buffers.items():
            if x is not None and engine.made_of_data.holds(x):
                m._buffers[key] = None
                yield f"buffer {name}.{key}".replace(" .", " ")


def carries(engine: "Engine", name: str) -> Refused:
    """Of something that a forward pass would carry data in."""
    return Refused(
        f"{engine.describe()}: its forward changes its {name}, which would carry "
        "data from the batch without noise.",
        module=engine.describe(),
        remedy=(
            "Replace the layer by one that keeps no running state, or put it in "
            "evaluation mode if that leaves it alone."
        ),
    )


def _made_of_data(values: List[Any]) -> bool:
    """Whether parts have left as many tensors, and not the same (tables of places)."""
    found = [list(tensors_in(value)) for value in values]
    if len(set(map(len, found))) > 1:
        return False
    return any(
        x.requires_grad or x.shape != column[0].shape or not torch.equal(x, column[0])
        for column in zip(*found)
        for x in column
    )


class MadeOfData:
    """Tensors that runs have made of data, for as long as somebody keeps them."""

    def __init__(self) -> None:
        self._refs: Dict[int, weakref.ref] = {}

    def __bool__(self) -> bool:
        return bool(self._refs)

    def add(self, x: torch.Tensor) -> None:
        """Remembers a tensor."""
        self._refs[id(x)] = weakref.ref(x)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether it is one of them."""
        ref = self._refs.get(id(x))
        return ref is not None and ref() is x

    def sweep(self) -> None:
        """Forgets what nobody keeps."""
        self._refs = {i: ref for i, ref in self._refs.items() if ref() is not None}


class Watch(TorchFunctionMode):
    """Where samples run one after the other, refuses what an earlier batch has left."""

    def __init__(self, engine: "Engine"):
        super().__init__()
        self.engine = engine

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        refuse_carried(self.engine, args)
        if kwargs:
            refuse_carried(self.engine, kwargs.values())
        return func(*args, **(kwargs or {}))
