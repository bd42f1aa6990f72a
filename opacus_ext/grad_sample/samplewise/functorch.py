"""The private functions of torch that a run of single samples needs, all of them here.

``torch.vmap`` is entered and left by hand, because a run must step out of it for the
kernels that it has no rule for, and back. tests/samplewise/functorch_test.py sees that
these functions exist and do what is relied on.
"""

from __future__ import annotations

import functools
import threading
import types
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Sequence

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
from torch.nn import functional as F

is_batched: Callable[[Any], bool] = is_batchedtensor


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the values of all samples, or ``x`` if it is plain."""
    while is_batched(x):
        x = get_unwrapped(x)
    return x


def wrapped_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The values of all samples ``[B, *shape]`` as they see them, if ``x`` is such."""
    return _add_batch_dim(y, 0, maybe_get_level(x)) if is_batched(x) else y


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


# Called with two tensors that have changed places.
EXCHANGED: List[Callable[[torch.Tensor, torch.Tensor], None]] = []


def replace_tensor(x: torch.Tensor, y: torch.Tensor) -> None:
    """
    Makes of the tensor ``x``, wherever Python refers to it, the tensor ``y``. Where
    autograd has saved ``x`` it keeps what it has saved.
    """
    # torch.utils.swap_tensors would refuse what autograd has saved.
    x.__dict__, y.__dict__ = y.__dict__, x.__dict__
    torch._C._swap_tensor_impl(x, y)
    for exchanged in EXCHANGED:
        exchanged(x, y)


def is_memory_of(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nothing but these tensors refers to the memory of ``x``."""
    memory = x.untyped_storage()  # counted as well
    if any(y.untyped_storage()._cdata != memory._cdata for y in tensors):
        return False
    return torch._C._storage_Use_Count(memory._cdata) == len(tensors) + 1


@contextmanager
def functions(handler: Callable) -> Iterator[None]:
    """
    Within it ``handler(function, apply, *args)`` is called in the place of
    ``function.apply(*args)``, of every ``torch.autograd.Function``.
    """
    plain = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(plain.__get__(None, cls), **kwargs)
        return handler(cls, own, *args)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain


def is_composite(function: Callable) -> bool:
    """Whether it is a Python function of ``torch.nn.functional``, made of other ops."""
    # Those that choose between two others (max_pool2d) live elsewhere.
    return getattr(function, "__globals__", None) is vars(F)


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


_handlers = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def checkpoints(handler: Callable) -> Iterator[None]:
    """
    Within it, and in this thread, ``torch.utils.checkpoint.checkpoint`` is
    ``handler(checkpoint, ...)``, also where it was imported by name. If several are
    within another, the innermost is given the next one as ``checkpoint``.
    """
    global _users
    wrapped = torch.utils.checkpoint.checkpoint.__wrapped__
    with _lock:
        if not _users:
            before = getattr(wrapped, _HIDDEN, wrapped)
            setattr(wrapped, _HIDDEN, functools.partial(_checkpoint, before))
        _users += 1
    stack = vars(_handlers).setdefault("stack", [])
    stack.append(handler)
    try:
        yield
    finally:
        stack.pop()
        with _lock:
            _users -= 1
            if not _users:
                delattr(wrapped, _HIDDEN)


_HIDDEN = "__dynamo_disable"  # where torch keeps what it calls in its place


def _checkpoint(plain: Callable, *args: Any, **kwargs: Any) -> Any:
    for handler in getattr(_handlers, "stack", ()):
        plain = functools.partial(handler, plain)
    return plain(*args, **kwargs)
