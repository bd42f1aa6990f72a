"""The tensors inside of whatever a model takes, returns or keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype)


def tensors_in(value: Any, _seen: Optional[set] = None) -> Iterator[torch.Tensor]:
    """
    The tensors in nested containers, dataclasses and other objects, each once, in an
    order that depends on the structure alone. Modules are not looked into.
    """
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    if isinstance(value, (*_PLAIN, nn.Module)) or callable(value):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Generator):
        parts = list(vars(value).values())
    else:
        return
    for part in parts:
        yield from tensors_in(part, seen)


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """
    ``fn`` on every tensor of a nested structure. Lists, tuples and mappings keep their
    types; other objects stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, Mapping):
        items = {key: map_tensors(fn, part) for key, part in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(items)
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(fn, part) for part in value])
    return value


def alike(a: List[torch.Tensor], b: List[torch.Tensor]) -> bool:
    """Whether two lists hold equal values, to rounding."""
    return len(a) == len(b) and all(map(close, a, b))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding, of the coarser of both types."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    half = min(a.dtype.itemsize, b.dtype.itemsize) < 4
    double = min(a.dtype.itemsize, b.dtype.itemsize) > 4
    a, b = a.detach().double(), b.detach().double()
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    tolerance = 0.1 if half else 1e-5 if double else 1e-3
    return torch.allclose(a, b, 0, tolerance * max(scale, 1e-12), True)
