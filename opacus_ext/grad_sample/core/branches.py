"""Branches on data: what the code asks of a sample is asked of all.

If all give one answer it is taken; if not, the group is split by their answers and each
part runs anew (:class:`~group.BranchesDiffer`). So it is with ``if`` and ``.item()``,
and with ops whose result has a shape that depends on data.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn
from torch.nn import init
from torch.utils._pytree import tree_map

from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import NotAtOnce, handles
from opacus_ext.refused import Refused

T = torch.Tensor


@handles(
    T.__bool__,
    T.__int__,
    T.__float__,
    T.__index__,
    T.__complex__,
    T.__format__,
    T.__repr__,
    T.__str__,
    T.item,
    T.tolist,
    T.numpy,
    T.is_nonzero,
    torch.is_nonzero,
    T.nonzero,
    torch.nonzero,
    T.argwhere,
    torch.argwhere,
    T.bincount,
    torch.bincount,
    T.unique,
    torch.unique,
    T.unique_consecutive,
    torch.unique_consecutive,
)
def ask(group: SampleGroup, func: Callable, x: T, *args: Any, **kwargs: Any) -> Any:
    """What Python makes of a tensor, and results whose shape the data decide."""
    return func(group.agree(x), *args, **kwargs)


@handles(torch.arange, torch.linspace)
def ask_all(group: SampleGroup, func: Callable, *args: Any, **kwargs: Any) -> T:
    """The arguments decide the shape."""
    return func(*_agreed(group, args), **_agreed(group, kwargs))


@handles(
    T.new_zeros,
    T.new_ones,
    T.new_empty,
    T.narrow,
    torch.narrow,
    T.masked_select,
    torch.masked_select,
    T.repeat_interleave,
    torch.repeat_interleave,
)
def ask_rest(group: SampleGroup, func: Callable, x: T, *args: Any, **kwargs: Any) -> T:
    """The arguments behind the first decide the shape."""
    return group.call(func, x, *_agreed(group, args), **_agreed(group, kwargs))


def _agreed(group: SampleGroup, given: Any) -> Any:
    return tree_map(lambda x: group.agree(x) if isinstance(x, T) else x, given)


@handles(torch.where, T.where)
def where(group: SampleGroup, func: Callable, condition: T, *args: Any) -> Any:
    """With a condition alone it is ``nonzero``."""
    if args:
        return group.call(func, condition, *args)
    return func(group.agree(condition))


@handles(T.__getitem__)
def getitem(group: SampleGroup, func: Callable, x: T, index: Any) -> Any:
    """``x[mask]`` has as many rows as the mask says, ``x[i:j]`` as the tensors say."""
    return group.call(func, x, _agreed_index(group, index))


@handles(T.__setitem__)
def setitem(group: SampleGroup, func: Callable, x: T, index: Any, value: Any) -> Any:
    """``x[mask] = value``."""
    if _is_mask(index) and not (isinstance(value, T) and value.dim()):
        with group:  # one value: how often it is written does not matter
            wide = index.reshape(index.shape + (1,) * (x.dim() - index.dim()))
            return x.masked_fill_(wide, value)
    return group.call(func, x, _agreed_index(group, index), value)


def _is_mask(x: Any) -> bool:
    return isinstance(x, T) and x.dtype in (torch.bool, torch.uint8)


def _agreed_index(group: SampleGroup, index: Any) -> Any:
    if _is_mask(index):
        return group.agree(index)
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        if any(isinstance(x, T) for x in ends):
            ends = (int(group.agree(x)) if isinstance(x, T) else x for x in ends)
            return slice(*ends)
    if type(index) in (tuple, list):
        return type(index)([_agreed_index(group, x) for x in index])
    return index


@handles(torch.equal, T.equal)
def equal(group: SampleGroup, func: Callable, a: T, b: T) -> bool:
    """Whether two tensors are equal, in each sample."""
    if a.shape != b.shape:
        return False
    with group:
        return bool((a == b).all())


@handles(torch.allclose, T.allclose)
def allclose(group: SampleGroup, func: Callable, *args: Any, **kwargs: Any) -> bool:
    """Whether two tensors are close, in each sample."""
    with group:
        return bool(torch.isclose(*args, **kwargs).all())


@handles(T.__contains__)
def contains(group: SampleGroup, func: Callable, x: T, item: Any) -> bool:
    """``item in x``."""
    with group:
        return bool((x == item).any())


# -- autograd, asked within the forward ------------------------------------------------


@handles(T.requires_grad.__get__)
def requires_grad(group: SampleGroup, func: Callable, x: T) -> bool:
    """vmap hides it."""
    return func(group.level.unwrap(x) if is_batched(x) else x)


@handles(T.requires_grad_)
def requires_grad_(group: SampleGroup, func: Callable, x: T, *args: Any) -> T:
    """Of what all samples share; a sample's own becomes an input of a gradient."""
    if is_batched(x) or not group.eager:
        return autograd_inside(group, func)
    with group.outside():
        return func(x, *args)


@handles(torch.autograd.grad, T.retain_grad)
def autograd_inside(group: SampleGroup, func: Callable, *args: Any, **kw: Any) -> Any:
    """
    Raises:
        NotAtOnce: a gradient is taken in the forward, of which the uses are not seen
    """
    raise NotAtOnce(f"{func.__name__} in the forward")


@handles(init.uniform_, init.normal_, init.kaiming_uniform_)
def initialize(group: SampleGroup, func: Callable, tensor: T, **kwargs: Any) -> T:
    """A layer that the forward makes is one for all samples."""
    if is_batched(tensor) or not isinstance(tensor, nn.Parameter):
        return func(tensor, **kwargs)
    with group.outside():
        return func(tensor, **kwargs)


@handles(T.backward)
def backward_inside(group: SampleGroup, func: Callable, *args: Any, **kw: Any) -> Any:
    """
    Raises:
        Refused: always
    """
    raise Refused(
        "backward() within the forward pass adds gradients that are not clipped.",
        remedy="Take torch.autograd.grad(..., create_graph=True) there, or call "
        "backward() outside.",
    )


@handles(T.register_hook)
def register_hook(group: SampleGroup, func: Callable, x: T, hook: Callable) -> Any:
    """A hook on an activation is shown the gradients of all samples of the group."""
    if not is_batched(x):
        return func(x, hook)

    def shown(grad: T) -> None:
        if hook(grad) is not None:
            raise Refused(
                f"A hook on a tensor ({getattr(hook, '__name__', hook)}) changes the "
                "gradient of an activation.",
                remedy="Remove it, or train one sample after the other: "
                'grad_sample_mode="scan".',
            )

    with group.outside():
        return func(group.level.unwrap(x), shown)
