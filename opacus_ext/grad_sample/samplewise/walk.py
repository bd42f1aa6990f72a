"""The tensors inside of whatever a model takes, returns or keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Iterator, Optional, Tuple, Union

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype)


Leaf = Union[torch.Tensor, PackedSequence]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """
    The tensors in nested containers, dataclasses and other objects, each once, in an
    order that depends on the structure alone. Modules are not looked into; of packed
    sequences it is the data.
    """
    for _, x in named_tensors(value):
        yield x


def named_tensors(value: Any) -> Iterator[Tuple[str, torch.Tensor]]:
    """The same with the names or positions they are found under: ``"aux.0"``."""
    for name, x in named_leaves(value):
        yield name, x.data if isinstance(x, PackedSequence) else x


def leaves_in(value: Any) -> Iterator[Leaf]:
    """The same with the packed sequences as they are."""
    for _, x in named_leaves(value):
        yield x


def named_leaves(
    value: Any, name: str = "", _seen: Optional[set] = None
) -> Iterator[Tuple[str, Leaf]]:
    """The same with names."""
    seen = set() if _seen is None else _seen
    if isinstance(value, PackedSequence):
        if id(value.data) not in seen:
            seen.update(map(id, value))
            yield name, value
        return
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
        return
    if isinstance(value, (*_PLAIN, nn.Module)) or callable(value):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Generator):
        parts = vars(value).items()
    else:
        return
    for key, part in list(parts):
        yield from named_leaves(part, f"{name}.{key}" if name else f"{key}", seen)


def map_tensors(
    fn: Callable[[torch.Tensor], Any], value: Any, packed: Callable = lambda x: x
) -> Any:
    """
    ``fn`` on every tensor of a nested structure, and ``packed`` on packed sequences.
    Lists, tuples and mappings keep their types; other objects stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return packed(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(fn, part, packed) for key, part in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(items)
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, part, packed) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(fn, part, packed) for part in value])
    return value


def close(a: torch.Tensor, b: torch.Tensor, tolerance: Optional[float] = None) -> bool:
    """
    Whether two tensors are equal but for rounding.

    Args:
        tolerance: relative to the largest entry; None: as the coarser type is rounded
    """
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    width = min(a.dtype.itemsize, b.dtype.itemsize)
    if tolerance is None:
        tolerance = 0.1 if width < 4 else 1e-5 if width > 4 else 1e-3
    # Some entries at a time: these may be the logits of a large vocabulary.
    a, b = (x.detach().reshape(-1).split(2**16) for x in (a, b))
    scale = max((_largest(y) for y in b), default=0.0)
    bound = tolerance * max(scale, 1e-12)
    return all(
        torch.allclose(x.to(_wide(x)), y.to(_wide(y)), 0, bound, True)
        for x, y in zip(a, b)
    )


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _largest(x: torch.Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
