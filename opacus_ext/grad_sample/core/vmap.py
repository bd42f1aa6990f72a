"""Levels of vmap, and the modes and hooks around a call; see private_torch.py."""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, ContextManager
from unittest.mock import patch

import torch
from torch.nn import functional as F

from opacus_ext import private_torch
from opacus_ext.private_torch import (
    is_batched,
    is_wrapped,
    pop_level,
    push_level,
    unwrapped,
)


class BranchesDiffer(Exception):
    """Raised when samples take different branches, numbered in ``answers [B]``."""

    def __init__(self, answers: torch.Tensor):
        super().__init__("samples take different branches")
        self.answers = answers


class Level:
    """A vmap level over ``size`` samples, entered and left explicitly."""

    def __init__(self, size: int):
        self.size, self.number = size, 0

    def __enter__(self) -> Level:
        # Ops without a vmap rule need these, which torch.vmap loads as well.
        private_torch.lazy_load_decompositions()
        self.number = private_torch.begin_level(self.size, "different")
        return self

    def __exit__(self, *exception: Any) -> None:
        private_torch.end_level()

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turns ``[B, *shape]`` into the tensor that one sample sees, ``[*shape]``."""
        return private_torch.add_batch_dim(tensor, 0, self.number)

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of all samples, ``[B, *shape]``; expands shared ones."""
        return private_torch.remove_batch_dim(tensor, self.number, self.size, 0)


class Outside:
    """A block outside of the vmap level, where tensors hold all samples."""

    def __enter__(self) -> None:
        self.layer = pop_level()

    def __exit__(self, *exception: Any) -> None:
        push_level(self.layer)


#: Returns autograd's saved-tensor hooks, which activation checkpointing sets, or None.
saved_tensor_hooks: Callable[[], tuple | None] = functools.partial(
    private_torch.top_saved_tensors_hooks, True
)


def checkpoint_around() -> str:
    """
    Returns "forward" in a call by torch's checkpoint (``use_reentrant=False``), "again"
    where it computes anew, otherwise "".
    """
    pack: Any = (saved_tensor_hooks() or [None])[0]
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return ""
    if "recomputation" in pack.__qualname__:
        return "again"
    return "forward"


def cache_kept() -> ContextManager:
    """Restores the cache of ``parametrize.cached`` at the end of the block."""
    return patch.dict(private_torch.cache_of_parametrize)


#: Python functions of ``torch.nn.functional``.
COMPOSITE = {f for f in vars(F).values() if getattr(f, "__globals__", None) is vars(F)}


@functools.cache
def decomposed(function: Callable) -> Callable:
    """Returns a copy of a composite function whose inner ops modes see."""
    inside = dict(vars(F))
    for name in vars(F):
        # A function that asks these looks for modes itself, before its inner ops run.
        if name.startswith("has_torch_function"):
            inside[name] = lambda *args: False
    copied = types.FunctionType(
        function.__code__, inside, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that torch.func transforms have wrapped, if any."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of all samples; the same one outside of vmap."""
    while is_batched(tensor):
        tensor = unwrapped(tensor)
    return tensor
