"""The private functions of torch that a run of single samples needs, all of them here.

``torch.vmap`` is entered and left by hand, because a run must step out of it for the
kernels that it has no rule for, and back. tests/samplewise/functorch_test.py sees that
these functions exist and do what is relied on.
"""

from __future__ import annotations

import functools
import types
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
import torch.utils.checkpoint
from torch._C._functorch import (
    _add_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.vmap import lazy_load_decompositions

is_batched: Callable[[Any], bool] = is_batchedtensor


class Level:
    """
    A level of vmap, over ``size`` samples.

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

    def __enter__(self) -> "Level":
        lazy_load_decompositions()
        self.number = _vmap_increment_nesting(self.size, "different")
        return self

    def __exit__(self, *exc: Any) -> None:
        _vmap_decrement_nesting()

    @property
    def innermost(self) -> bool:
        """Whether no other transform (of the user's own) is at work inside of it."""
        stack = peek_interpreter_stack()
        return stack is not None and stack.level() == self.number

    def wrap(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, *shape]`` as one sample sees it, ``[*shape]``."""
        return _add_batch_dim(x, 0, self.number)

    def unwrap(self, x: torch.Tensor) -> torch.Tensor:
        """The samples of a value side by side: ``[B, *shape]``."""
        dim = maybe_get_bdim(x)
        inner = get_unwrapped(x)
        return inner if dim == 0 else inner.movedim(dim, 0)

    def owns(self, x: Any) -> bool:
        """Whether a tensor has one value a sample, at this level."""
        return is_batchedtensor(x) and maybe_get_level(x) == self.number

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is done within is done to the whole batch, without vmap."""
        if not self.innermost:
            yield  # it is outside already
            return
        layer = pop_dynamic_layer_stack()
        try:
            yield
        finally:
            push_dynamic_layer_stack(layer)


def apply_outside(level: Level, function: type) -> Callable[..., Any]:
    """``function.apply`` of an autograd function on whole batches, from inside."""
    plain = torch._C._FunctionBase.__dict__["apply"].__get__(None, function)

    def apply(*args: Any) -> Any:
        if peek_interpreter_stack() is None:
            return plain(*args)
        layer = pop_dynamic_layer_stack()
        try:
            return plain(*args)
        finally:
            push_dynamic_layer_stack(layer)

    return apply


def become(x: torch.Tensor, y: torch.Tensor) -> None:
    """
    Makes of the tensor ``x``, wherever it is referred to, the tensor ``y``.

    Raises:
        RuntimeError: if C++ code or a weak reference holds on to ``x``
    """
    torch.utils.swap_tensors(x, y)


def descend(function: Callable) -> Callable:
    """
    A Python function of ``torch.nn.functional`` that does not show itself to modes as
    one op, so that these see the ops it is made of.
    """
    plain = _undisguised.get(function)
    if plain is None:
        hidden = {n: _no for n in function.__globals__ if n.startswith("has_torch_fun")}
        plain = types.FunctionType(
            function.__code__,
            {**function.__globals__, **hidden},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        plain.__kwdefaults__ = function.__kwdefaults__
        _undisguised[function] = plain
    return plain


_undisguised: dict = {}


def _no(*args: Any) -> bool:
    return False


@contextmanager
def checkpoints(handler: Callable) -> Iterator[None]:
    """
    Within it ``torch.utils.checkpoint.checkpoint`` is ``handler``, also where it was
    imported by name.
    """
    wrapped = torch.utils.checkpoint.checkpoint.__wrapped__
    name = "__dynamo_disable"
    before = getattr(wrapped, name, None)
    setattr(wrapped, name, functools.partial(handler, before or wrapped))
    try:
        yield
    finally:
        if before is None:
            delattr(wrapped, name)
        else:
            setattr(wrapped, name, before)
