"""What a model's forward leaves on its modules, where its samples run in parts.

Each part finds the modules as they were before the first. What a run has made of data
and somebody keeps is remembered: a later forward that reads it would carry data from
batch to batch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.samplewise.run import Refused, refuse_carried
from opacus_ext.grad_sample.samplewise.walk import tensors_in

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

# Of buffers, parameters, modules and hooks.
_TABLES = [name for name, x in vars(nn.Module()).items() if isinstance(x, dict)]
_NOT_STATE = frozenset(vars(nn.Module())) | {"forward"}

Left = Dict[Tuple[int, str], Any]  # by module and name, what a part left


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
        if values:
            for name, x in self._tensors():
                self.values[id(x)] = name, x, x.detach().clone(), x._version
        self.after: List[Left] = []
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
        with torch.no_grad():
            for _, x, value, version in self.values.values():
                if x._version != version:
                    x.copy_(value)

    def end(self) -> None:
        """After each part: what it left."""
        left: Left = {}
        for i, (m, kept) in enumerate(zip(self.modules, self.before)):
            for name, value in vars(m).items():
                if value is not kept.get(name, self) and name not in _NOT_STATE:
                    left[i, name] = value
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
        raise Refused(
            f"{self.engine.describe()}: its forward changes its {name}, which would "
            "carry data from the batch without noise. Replace the layer by one that "
            "keeps no running state, or put it in evaluation mode if that leaves it "
            "alone."
        )

    def common(self) -> List[Left]:
        """Of each part the tensors that all of them left, in the same places."""
        first, *others = self.after
        keys = [
            key
            for key, value in first.items()
            if all(_alike(value, other.get(key)) for other in others)
        ]
        return [{key: left[key] for key in keys} for left in self.after]

    def put(self, left: Left) -> None:
        """These are what the modules keep."""
        for (i, name), value in left.items():
            vars(self.modules[i])[name] = value

    def check(self) -> None:
        """
        Raises:
            Refused: if data of this batch have become a buffer
        """
        for name, m in zip(self.names, self.modules):
            for key, x in m._buffers.items():
                if x is not None and self.engine.left.holds(x):
                    m._buffers[key] = None
                    self.refuse(f"buffer {name}.{key}".replace(" .", " "))


def _alike(a: Any, b: Any) -> bool:
    counts = [sum(1 for _ in tensors_in(x)) for x in (a, b)]
    return counts[0] == counts[1] > 0


class LeftBehind:
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
