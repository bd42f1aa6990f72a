"""The tensors of a nested batch, and one sample of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, List

import torch


class Slicer:
    """Takes one sample out of a batch by the size of the first dimension."""

    batch_size = -1

    def cuts(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.size(0) == self.batch_size

    def __call__(self, batch: Any, b: int) -> Any:
        return map_tensors(lambda t: t[b : b + 1] if self.cuts(t) else t, batch)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def clone(batch: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone(), batch)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """``fn`` on every tensor of a nested batch; the containers keep their types."""
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(fn, value) for key, value in batch.items()}
        try:
            kind: Any = type(batch)
            return kind(items)
        except TypeError:
            return items
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(fn, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(fn, value) for value in batch)
    return batch


def tensors_of(batch: Any) -> List[torch.Tensor]:
    found: List[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found
