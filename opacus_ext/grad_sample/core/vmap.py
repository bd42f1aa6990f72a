"""The private functions of torch that are needed, all of them here.

Samples run under ``torch.vmap``. Some kernels are better called for all samples at
once, so the mode steps out of vmap and back; that takes these functions.
"""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional

import torch
from torch._C._functorch import (
    _add_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.vmap import lazy_load_decompositions
from torch.nn import functional as F

is_batched: Callable[[Any], bool] = is_batchedtensor


class Level:
    """
    A level of vmap over ``size`` samples, entered and left by hand.

    Example:
        >>> level = Level(3)
        >>> with level:
        ...     y = 2 * level.wrap(torch.ones(3, 4))
        ...     tuple(y.shape), tuple(level.unwrap(y).shape)
        ((4,), (3, 4))
    """

    def __init__(self, size: int):
        self.size = size
        self.number = 0

    def __enter__(self) -> Level:
        lazy_load_decompositions()
        self.number = _vmap_increment_nesting(self.size, "different")
        return self

    def __exit__(self, *exception: Any) -> None:
        _vmap_decrement_nesting()

    @property
    def innermost(self) -> bool:
        """Whether no other transform of torch.func runs inside this level."""
        stack = peek_interpreter_stack()
        return stack is not None and stack.level() == self.number

    def wrap(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, *shape]`` as one sample sees it, ``[*shape]``."""
        return _add_batch_dim(x, 0, self.number)

    def unwrap(self, x: torch.Tensor) -> torch.Tensor:
        """The values of all samples, ``[B, *shape]``."""
        inner, dim = get_unwrapped(x), maybe_get_bdim(x)
        return inner if dim == 0 else inner.movedim(dim, 0)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Steps out of vmap: tensors within are those of all samples."""
        layer = pop_dynamic_layer_stack()
        try:
            yield
        finally:
            push_dynamic_layer_stack(layer)


def saved_tensor_hooks() -> Optional[tuple]:
    """The hooks that pack what autograd saves, as activation checkpointing sets."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def will_run(node: Any) -> bool:
    """Within a backward pass, whether it comes to this node of the graph."""
    return torch._C._will_engine_execute_node(node)


def is_composite(function: Callable) -> bool:
    """Whether it is a Python function of ``torch.nn.functional``, made of other ops."""
    return getattr(function, "__globals__", None) is vars(F)


_open: Dict[Callable, Callable] = {}


def opened(function: Callable) -> Callable:
    """A composite function that modes see op by op, and not as one op."""
    if function not in _open:
        names = (n for n in vars(F) if n.startswith("has_torch_function"))
        hidden = dict.fromkeys(names, lambda *args: False)
        found = types.FunctionType(
            function.__code__,
            {**vars(F), **hidden},
            function.__name__,
            function.__defaults__,
        )
        found.__kwdefaults__ = function.__kwdefaults__
        _open[function] = found
    return _open[function]


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the values of all samples, or ``x`` if it is plain."""
    while is_batched(x):
        x = get_unwrapped(x)
    return x
