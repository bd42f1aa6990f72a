"""Private functions of torch that the core needs."""

from __future__ import annotations

import functools
import types
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Iterator
from unittest.mock import patch

import torch
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

is_batched: Callable[[Any], bool] = _functorch.is_batchedtensor
#: Returns the number of the innermost level, of vmap or another transform, or None.
current_level: Callable[[], Any] = _functorch.maybe_current_level
#: Gives a tensor another node of the graph, which in-place changes do not replace.
renewed: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default._op


class Level:
    """A vmap level over ``size`` samples, entered and left explicitly."""

    def __init__(self, size: int):
        self.size, self.number = size, 0

    def __enter__(self) -> Level:
        lazy_load_decompositions()
        self.number = _functorch._vmap_increment_nesting(self.size, "different")
        return self

    def __exit__(self, *exception: Any) -> None:
        _functorch._vmap_decrement_nesting()

    def wrap(self, x: torch.Tensor) -> torch.Tensor:
        """Turns ``[B, *shape]`` into the tensor that one sample sees, ``[*shape]``."""
        return _functorch._add_batch_dim(x, 0, self.number)

    def unwrap(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the values of all samples, ``[B, *shape]``; expands shared ones."""
        return _functorch._remove_batch_dim(x, self.number, self.size, 0)


def modes_above(mode: TorchFunctionMode) -> list[Any]:
    """Returns the modes that see an op before this one."""
    stack = _get_current_function_mode_stack()
    return stack[stack.index(mode) + 1 :]


@contextmanager
def without_modes(modes: list[Any]) -> Iterator[None]:
    """Leaves the innermost torch function modes for a block."""
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            mode.__enter__()


#: Leaves the innermost level, and returns what :data:`push_level` needs to go back.
pop_level: Callable[[], Any] = _functorch.pop_dynamic_layer_stack
push_level: Callable[[Any], Any] = _functorch.push_dynamic_layer_stack


class Outside:
    """A block outside of the vmap level, where tensors hold all samples."""

    def __enter__(self) -> None:
        self.layer = pop_level()

    def __exit__(self, *exception: Any) -> None:
        push_level(self.layer)


#: Returns autograd's saved-tensor hooks, which activation checkpointing sets, or None.
saved_tensor_hooks: Callable[[], tuple | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)


def checkpoint_around() -> str:
    """
    Returns "forward" in a call by torch's checkpoint (``use_reentrant=False``), "again"
    where it computes anew, otherwise "".
    """
    pack: Any = (saved_tensor_hooks() or [None])[0]
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return ""
    return "again" if "recomputation" in pack.__qualname__ else "forward"


def cache_kept() -> ContextManager:
    """Restores the cache of ``parametrize.cached`` at the end of the block."""
    return patch.dict(parametrize._cache)


def will_run(node: Any) -> bool:
    """Returns True if the running backward pass reaches this node of the graph."""
    return torch._C._will_engine_execute_node(node)


def is_composite(function: Callable) -> bool:
    """Returns True for Python functions of ``torch.nn.functional``."""
    return getattr(function, "__globals__", None) is vars(F)


@functools.cache
def decomposed(function: Callable) -> Callable:
    """Returns a copy of a composite function whose inner ops modes see."""
    names = [n for n in vars(F) if n.startswith("has_torch_function")]
    inside = {**vars(F), **dict.fromkeys(names, lambda *args: False)}
    given = function.__code__, inside, function.__name__, function.__defaults__
    found = types.FunctionType(*given)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def innermost(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that torch.func transforms have wrapped, if any."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def whole(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of all samples; ``x`` itself outside of vmap."""
    while is_batched(x):
        x = _functorch.get_unwrapped(x)
    return x
