"""Values compared by type and bits, and tensors whose memory is compared.

Equality is too coarse: ``-0.0 == 0.0`` and ``True == 1 == 1.0``, but code can tell them
apart. Objects that print alike, or call themselves equal, may hold different numbers.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Hashable, NamedTuple, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec

from opacus_ext.grad_sample.core.vmap import innermost

T = torch.Tensor

_AS_THEY_ARE = {int, bool, str, bytes, type(None), torch.dtype, torch.device}
_AS_THEY_ARE |= {torch.layout, torch.memory_format}
_MANY = 10_000  # the most entries of a tensor of a model's state that are compared
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def key_of(value: Any) -> Hashable | None:
    """
    Returns a key of a plain value, the same for the same type and bits. None for other
    objects, of which it can't be told if they are the same.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return kind, value
    if isinstance(value, enum.Enum):  # which may call others equal
        return kind, value.name, key_of(value.value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind in (slice, range):
        parts: Sequence[Any] = (value.start, value.stop, value.step)
    elif kind in (tuple, torch.Size):
        parts = value
    else:
        return None
    keys = [key_of(part) for part in parts]
    return None if None in keys else (kind, *keys)


def key_of_tree(spec: TreeSpec) -> Hashable | None:
    """
    Returns a key of the structure of a tree, the same for the same types and keys; None
    if nodes have something else about them, which is not known to be the same.
    """
    if spec.is_leaf():
        return "leaf"
    about: Any = spec.context
    if isinstance(about, list):  # keys of a dict
        about = tuple(about)
    if not isinstance(about, type):  # of a named tuple
        about = key_of(about)
    keys = [about, *map(key_of_tree, spec.children())]
    return None if None in keys else (spec.type, *keys)


def are_same(one: Any, other: Any) -> bool:
    """Returns True for one object, or plain values, arrays or tensors of equal bits."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, T):
        return have_same_bits(one, other)
    if isinstance(one, (np.ndarray, np.generic)) and one.dtype != object:
        form = one.shape, one.dtype
        return form == (other.shape, other.dtype) and one.tobytes() == other.tobytes()
    key = key_of(one)
    return key is not None and key == key_of(other)


def as_bits(x: T) -> T:
    """Returns the entries as integers of their bits."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    return x.view(_INTEGERS[x.dtype.itemsize])


def have_same_bits(one: T, other: T) -> bool:
    """Returns True for tensors of one shape, dtype and bits."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(as_bits(one), as_bits(other))


def compared_entries(x: T) -> Any:
    """Returns the entries of a tensor to compare: all, or some if there are many."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    view = x.detach()
    while view.numel() > _MANY:
        longest = max(range(view.dim()), key=view.shape.__getitem__)
        view = view.transpose(0, longest)[::2]
    return view


def holds_still(x: T, copy: T) -> bool:
    """Returns True if a tensor's entries equal an earlier copy of these."""
    view = compared_entries(x)
    return view is not None and have_same_bits(view, copy)


# -- memory ----------------------------------------------------------------------------


def memory(x: T) -> int:
    """Returns the address of a tensor's memory, which its views share."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            x = x.to_local()
    x = innermost(x)
    if x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return 0
    return x.untyped_storage().data_ptr()


class _Span(NamedTuple):
    """Addresses of a tensor: its first and last, and those of one sample."""

    first: int
    last: int
    step: int  # from sample to sample
    size: int  # of the first sample

    def is_apart(self, other: _Span) -> bool:
        """Returns True if samples with different numbers share no address."""
        if self.last <= other.first or other.last <= self.first:
            return True
        first = min(self.first, other.first)
        last = max(self.first + self.size, other.first + other.size)
        return self.step == other.step and last - first <= self.step


def _span_of(x: T, dim: int) -> _Span:
    width, step = x.itemsize, x.stride(dim) * x.itemsize
    reach = sum(s * (n - 1) for s, n in zip(x.stride(), x.shape)) * width + width
    size = reach - step * (x.shape[dim] - 1)
    first = x.data_ptr()
    return _Span(first, first + reach, step, size)


def _overlaps(x: T) -> bool:
    """Returns True if entries of a tensor may be one number in memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def set_apart(tensors: Sequence[T], dims: Sequence[int]) -> list[T]:
    """
    Returns the tensors, of which samples are along these dims. Those whose samples
    share memory with other samples are copied, as code may write to a sample.
    """
    found: list[T] = []
    spans: list[_Span] = []
    for x, dim in zip(tensors, dims):
        plain = x.layout is torch.strided and not is_traceable_wrapper_subclass(x)
        if plain and x.numel() and x.shape[dim] > 1:
            span = _span_of(x, dim)
            shared = span.step < span.size and _overlaps(x)
            if shared or not all(map(span.is_apart, spans)):
                x = x.clone(memory_format=torch.contiguous_format)
            else:
                spans.append(span)
        found.append(x)
    return found
