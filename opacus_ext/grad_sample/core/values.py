"""Values compared by type and bits, and tensors whose memory is compared.

Equality is too coarse: ``-0.0 == 0.0`` and ``True == 1 == 1.0``, but code can tell them
apart. Objects that print alike, or call themselves equal, may hold different numbers.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Callable, Hashable, NamedTuple, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from opacus_ext.grad_sample.core.vmap import innermost
from opacus_ext.private_torch import TreeSpec, is_traceable_wrapper_subclass

T = torch.Tensor
# The id of a tensor; in compiled code the tensor itself.
Key = Any

_AS_THEY_ARE = {int, bool, str, bytes, type(None), torch.dtype, torch.device}
_AS_THEY_ARE |= {torch.layout, torch.memory_format}
# The most entries of a tensor of a model's state that are compared.
_MANY = 10_000
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def key_of(value: Any) -> Hashable | None:
    """
    Returns a key of a plain value, the same for the same type and bits. None for other
    objects, of which it can't be told if they are the same.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return kind, value
    # An enum may call others equal. Its name and its value tell it from them.
    if isinstance(value, enum.Enum):
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
    keys = [*map(key_of, parts)]
    return None if None in keys else (kind, *keys)


def key_function() -> Callable[..., Key]:
    """
    Returns what gives the key of a tensor in dicts: comparing tensors would compare
    their values, and in compiled code the result of an op has no id.
    """
    return _itself if torch.compiler.is_compiling() else id


def _itself(tensor: T) -> Key:
    return tensor


def key_of_tree(structure: TreeSpec) -> Hashable | None:
    """
    Returns a key of the structure of a tree, the same for the same types and keys; None
    if nodes have something else about them, which is not known to be the same.
    """
    if structure.is_leaf():
        return "leaf"
    context: Any = structure.context
    # The context of a dict is the list of its keys, that of a named tuple its class.
    if isinstance(context, list):
        context = tuple(context)
    if not isinstance(context, type):
        context = key_of(context)
    keys = [context, *map(key_of_tree, structure.children())]
    return None if None in keys else (structure.type, *keys)


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


def as_bits(tensor: T) -> T:
    """Returns the entries as integers of their bits."""
    # Conjugates and negatives are views whose bits torch has not computed yet.
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    else:
        tensor = tensor.resolve_neg()
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def have_same_bits(one: T, other: T) -> bool:
    """Returns True for tensors of one shape, dtype and bits."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(as_bits(one), as_bits(other))


def compared_entries(tensor: T) -> T | None:
    """Returns the entries of a tensor to compare: all, or some if there are many."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    view = tensor.detach()
    # Half of the longest dim is left out until few entries remain.
    while view.numel() > _MANY:
        longest = max(range(view.dim()), key=view.shape.__getitem__)
        view = view.transpose(0, longest)[::2]
    return view


def holds_still(tensor: T, copy: T) -> bool:
    """Returns True if a tensor's entries equal an earlier copy of these."""
    view = compared_entries(tensor)
    return view is not None and have_same_bits(view, copy)


# -- memory ----------------------------------------------------------------------------


def memory(tensor: T) -> int:
    """Returns the address of a tensor's memory, which its views share."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    tensor = innermost(tensor)
    if not _is_strided(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _is_strided(tensor: T) -> bool:
    """Returns True if a tensor's entries lie in memory of its own."""
    if tensor.layout is not torch.strided:
        return False
    return not is_traceable_wrapper_subclass(tensor)


class _Span(NamedTuple):
    """
    The addresses of a tensor.

    Attributes:
        step: from sample to sample
        size: of the first sample
    """

    first: int
    last: int
    step: int
    size: int

    def is_apart(self, other: _Span) -> bool:
        """Returns True if samples with different numbers share no address."""
        if self.last <= other.first or other.last <= self.first:
            return True
        first = min(self.first, other.first)
        last = max(self.first + self.size, other.first + other.size)
        return self.step == other.step and last - first <= self.step


def _span_of(tensor: T, sample_dim: int) -> _Span:
    # The entries from the first to the last, as they lie in memory.
    reach = 1
    for stride, length in zip(tensor.stride(), tensor.shape):
        reach += stride * (length - 1)
    width = tensor.itemsize
    step = tensor.stride(sample_dim)
    sample_size = reach - step * (tensor.shape[sample_dim] - 1)
    start = tensor.data_ptr()
    return _Span(start, start + reach * width, step * width, sample_size * width)


def _overlaps(tensor: T) -> bool:
    """Returns True if entries of a tensor may be one number in memory."""
    # Two indices never meet if each stride exceeds all that the smaller ones reach.
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False


def set_apart(tensors: Sequence[T], dims: Sequence[int]) -> list[T]:
    """
    Returns the tensors, of which samples are along these dims. Those whose samples
    share memory with other samples are copied, as code may write to a sample.
    """
    separate: list[T] = []
    spans: list[_Span] = []
    for tensor, sample_dim in zip(tensors, dims):
        if _is_strided(tensor) and tensor.numel() and tensor.shape[sample_dim] > 1:
            span = _span_of(tensor, sample_dim)
            shared = span.step < span.size and _overlaps(tensor)
            # Samples of two arguments may share memory, too.
            if shared or not all(map(span.is_apart, spans)):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            else:
                spans.append(span)
        separate.append(tensor)
    return separate
