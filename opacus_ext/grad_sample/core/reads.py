"""Numbers that code is told of the data of a sample that runs alone.

Samples that run together need none of this: vmap has no numbers to give, and no shapes
that depend on data, so code that wants some asks the group, or fails. To a sample alone
torch gives them. They are found without a list of all functions that do: by ops that
torch marks, or runs to turn a tensor into a number; by results that are no tensors,
unless a function is known to tell of shapes and types alone; and by errors.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_ext.grad_sample.core.groups import READING
from opacus_ext.grad_sample.rules import HANDLERS

T = torch.Tensor

_TELLING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = torch.ops.aten.index.Tensor  # only masks decide its shape
_CTC = torch.ops.aten._ctc_loss  # whose loss has a fixed shape, if not all it returns
_FIXED = {_CTC.default, _CTC.Tensor}
_MASKS = (torch.bool, torch.uint8)

# Functions that return no tensor, and tell nothing of its entries.
_ABOUT = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size"),
    *("storage_offset", "get_device", "type", "result_type", "can_cast", "dim_order"),
    *("is_tensor", "is_storage", "is_floating_point", "is_complex", "is_signed"),
    *("is_conj", "is_neg", "is_inference", "is_contiguous", "is_pinned", "is_shared"),
    *("is_same_size", "is_set_to", "has_names", "sparse_dim", "dense_dim"),
    *("__len__", "__iter__", "__hash__", "__dir__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
}


class Reads(TorchFunctionMode):
    """
    Code of a sample that runs alone, and whether it was told a number of the data.
    Subclasses may tell which tensors are made of data: here all.

    Args:
        sees_ops: True to see the ops that torch runs, too, which takes as long again;
            if False, some sizes that data make are not seen
    """

    def __init__(self, sees_ops: bool = True):
        super().__init__()
        self._sees_ops, self._ops, self._was_told = sees_ops, _Ops(), False

    def __enter__(self) -> Any:
        if self._sees_ops:
            self._ops.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._sees_ops:
            self._ops.__exit__(*exception)

    @property
    def read_data(self) -> bool:
        """True if the code has been told a number of the data."""
        return self._was_told or self._ops.told

    def is_data(self, x: T) -> bool:
        """Returns True if a tensor is made of the sample's data."""
        return True

    def agree(self, x: T) -> T:
        """Notes that the code asks for a value."""
        self._was_told |= isinstance(x, T) and self.is_data(x)
        return x

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of torch."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((*args, *kwargs.values())))
        of_data = not given or any(map(self.is_data, given))
        before, self._ops.told = self._ops.told, False
        told = bool(given)  # if there is an error, it tells something
        try:
            handler = HANDLERS.get(func)
            run = partial(handler, self, func) if handler in READING else None
            found = (run or partial(self.call, func))(*args, **kwargs)
            told = self._ops.told or told and _tells(func, args, found)
            return found
        finally:
            self._was_told |= told and of_data
            self._ops.told = before


class _Ops(TorchDispatchMode):
    """Sees the ops that functions of torch run; ``told`` if some told a number."""

    supports_higher_order_operators = True
    told = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.told = self.told or _op_tells(func, args)
        return func(*args, **(kwargs or {}))


def _op_tells(func: Any, args: tuple) -> bool:
    if func is _INDEX:
        return any(x is not None and x.dtype in _MASKS for x in args[1])
    tags = getattr(func, "tags", ())  # those of control flow have none
    return not _TELLING.isdisjoint(tags) and func not in _FIXED


def _tells(func: Callable, args: tuple, found: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "tensor_split":  # reads its argument's memory, by no op
        return any(isinstance(x, T) for x in args[1:])
    if name == "__get__":  # of an attribute: one of the array interfaces
        return isinstance(found, dict)
    if name == "_pack_padded_sequence":  # has as many rows as its lengths say
        return True
    return name not in _ABOUT and not _are_tensors(found)


def _are_tensors(found: Any) -> bool:
    """Returns True for tensors, None, and tuples and lists of these."""
    if isinstance(found, T):  # sparse and nested ones have as many entries as data say
        return found.layout is torch.strided and not found.is_nested
    if isinstance(found, (tuple, list)):
        return all(map(_are_tensors, found))
    return found is None


def tensors_in(values: Iterable) -> Iterator[T]:
    """Yields the tensors among values, and in lists and tuples of these."""
    for x in values:
        if isinstance(x, T):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(x)
