"""Branches on data: what samples say is asked of all, and taken if they agree.

If they don't, the batch is split by what they say (:class:`~batch.BranchesDiffer`), and
each part runs by itself. So it is with ``if`` and ``.item()``, and with ops whose
output has a shape that depends on the data.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, List, Sequence

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.ops import handles
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.walk import map_tensors

T = torch.Tensor


@handles(
    T.__bool__,
    T.__int__,
    T.__float__,
    T.__index__,
    T.item,
    T.tolist,
    T.__complex__,
    torch.is_nonzero,
    T.is_nonzero,
    T.__format__,
    T.__repr__,
    T.__str__,
    T.numpy,
)
def ask(run: Run, func: Callable, x: T, *args: Any, **kwargs: Any) -> Any:
    """What Python makes of a tensor."""
    return func(run.agree(x), *args, **kwargs)


@handles(T.__contains__)
def contains(run: Run, func: Callable, x: T, item: Any) -> bool:
    """``item in x``"""
    found = run.call(torch.eq, x, item)
    with run:
        return bool(found.any())


@handles(torch.equal, T.equal)
def equal(run: Run, func: Callable, a: T, b: T) -> bool:
    """``torch.equal``"""
    if a.shape != b.shape:
        return False
    with run:
        return bool((a == b).all())


@handles(torch.allclose, T.allclose)
def allclose(run: Run, func: Callable, *args: Any, **kwargs: Any) -> bool:
    """``torch.allclose``"""
    with run:
        return bool(torch.isclose(*args, **kwargs).all())


@handles(T.requires_grad.__get__)
def requires_grad(run: Run, func: Callable, x: T) -> bool:
    """Of what samples see, that of all."""
    if is_batched(x) and run.level.owns(x):
        x = run.level.unwrap(x)
    return func(x)


@handles(T.requires_grad_)
def requires_grad_(run: Run, func: Callable, x: T, wanted: bool = True) -> T:
    """A leaf that samples have made, each its own."""
    if not is_batched(x) and not run.widen(x):
        return func(x, wanted)
    inner = run.level.unwrap(x)
    with run.outside():
        inner.requires_grad_(wanted)
    return x


@handles(
    torch.nonzero,
    T.nonzero,
    torch.argwhere,
    T.argwhere,
    torch.bincount,
    T.bincount,
    torch.unique,
    T.unique,
    torch.unique_consecutive,
    T.unique_consecutive,
)
def shaped_by_data(run: Run, func: Callable, x: T, *args: Any, **kwargs: Any) -> Any:
    """Ops whose output has a shape that the data decide."""
    return func(run.agree(x), *args, **kwargs)


@handles(torch.where, T.where)
def where(run: Run, func: Callable, condition: T, *args: Any, **kwargs: Any) -> Any:
    """With a condition alone it is ``nonzero``."""
    if args or kwargs:
        return run.call(func, condition, *args, **kwargs)
    return func(run.agree(condition))


@handles(torch.masked_select, T.masked_select)
def masked_select(run: Run, func: Callable, x: T, mask: T, **kwargs: Any) -> T:
    """``x[mask]``"""
    return run.call(func, x, run.agree(mask), **kwargs)


@handles(torch.repeat_interleave, T.repeat_interleave)
def repeat_interleave(run: Run, func: Callable, *args: Any, **kwargs: Any) -> T:
    """The numbers of repeats decide the shape."""
    if len(args) > 1 and isinstance(args[1], T):
        args = (args[0], run.agree(args[1]), *args[2:])
    if isinstance(kwargs.get("repeats"), T):
        kwargs["repeats"] = run.agree(kwargs["repeats"])
    return run.call(func, *args, **kwargs)


def _is_mask(x: Any) -> bool:
    return isinstance(x, T) and x.dtype in (torch.bool, torch.uint8) and is_batched(x)


def _agreed(run: Run, index: Any) -> Any:
    if _is_mask(index):
        return run.agree(index)
    if isinstance(index, slice):
        ends = (index.start, index.stop, index.step)
        if any(isinstance(x, T) for x in ends):
            return slice(*(int(run.agree(x)) if isinstance(x, T) else x for x in ends))
    if type(index) in (tuple, list) and any(
        _is_mask(x) or isinstance(x, slice) for x in index
    ):
        return type(index)(_agreed(run, x) for x in index)
    return index


@handles(T.__getitem__)
def getitem(run: Run, func: Callable, x: T, index: Any) -> Any:
    """``x[mask]`` has as many rows as the mask says."""
    return run.call(func, x, _agreed(run, index))


@handles(T.__setitem__)
def setitem(run: Run, func: Callable, x: T, index: Any, value: Any) -> Any:
    """``x[mask] = value``"""
    if _is_mask(index) and not (isinstance(value, T) and value.dim()):
        # Of one value the shape does not matter.
        with run:
            wide = index.reshape(index.shape + (1,) * (x.dim() - index.dim()))
            return x.masked_fill_(wide, value)
    return run.call(func, x, _agreed(run, index), value)


@handles(
    torch._VF._pack_padded_sequence, torch._C._VariableFunctions._pack_padded_sequence
)
def pack(run: Run, func: Callable, x: T, lengths: T, batch_first: bool) -> List[T]:
    """
    A batch of one, or several sequences of one sample, of as many steps in each.
    """
    lengths = run.agree(lengths)
    if not is_batched(x):
        return func(x, lengths, batch_first)
    size, length = (x.shape[0], x.shape[1]) if batch_first else x.shape[1::-1]
    with run.outside():
        every = torch.arange(size * length).view(size, length)
        rows, sizes = func(every, lengths, True)
    with run:
        x = x if batch_first else x.transpose(0, 1)
        return [x.flatten(0, 1)[rows.to(x.device)], sizes]


@handles(
    torch._VF._pad_packed_sequence, torch._C._VariableFunctions._pad_packed_sequence
)
def unpack(
    run: Run,
    func: Callable,
    data: T,
    sizes: T,
    batch_first: bool,
    value: float,
    total_length: int,
) -> List[T]:
    """The sequences of one sample, padded at their ends."""
    sizes = run.agree(sizes)
    if not is_batched(data):
        return func(data, sizes, batch_first, value, total_length)
    with run.outside():
        every = torch.arange(len(data))
        rows, lengths = func(every, sizes, batch_first, len(data), total_length)
        lengths = run.level.wrap(lengths.expand(run.size, -1))
    with run:
        end = torch.full_like(data[:1], value)
        return [torch.cat([data, end])[rows.to(data.device)], run.track(lengths)]


@handles(torch._C._nn.pad_sequence)
def pad_sequence(
    run: Run,
    func: Callable,
    sequences: Sequence[T],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> T:
    """The sequences of one sample."""
    length = max(map(len, sequences))
    with run:
        padded = []
        for x in sequences:
            ends = [0, length - len(x)]
            ends = ends if padding_side == "right" else ends[::-1]
            ends = [0, 0] * (x.dim() - 1) + ends
            padded.append(F.pad(x, ends, value=padding_value))
        return torch.stack(padded, 0 if batch_first else 1)


@handles(T.scatter_)
def scatter_(run: Run, func: Callable, x: T, *args: Any, **kwargs: Any) -> T:
    """vmap has a rule for ``scatter`` alone."""
    with run:
        return x.copy_(x.scatter(*args, **kwargs))


@handles(T.register_hook)
def register_hook(run: Run, func: Callable, x: T, hook: Callable) -> Any:
    """A hook on an activation sees the gradient of each sample."""
    if not is_batched(x):
        return func(x, hook)
    inner = _captured(run, x)

    def by_sample(grad: T) -> Any:
        return torch.vmap(hook, randomness="different")(grad)

    with run.outside():
        return func(inner, by_sample)


@handles(T.retain_grad)
def retain_grad(run: Run, func: Callable, x: T) -> None:
    """The gradient of an activation is kept as the batch has it."""
    if not is_batched(x):
        return func(x)
    inner, kept = _captured(run, x), weakref.ref(x)

    def keep(grad: T) -> None:
        if kept() is not None:
            kept().grad = grad.flatten(0, 1) if grad.dim() > 1 else grad

    with run.outside():
        inner.register_hook(keep)
    return None


def _captured(run: Run, x: T) -> T:
    """The values of all samples, as autograd has them."""
    inner = run.level.unwrap(x)
    if inner is not torch._C._functorch.get_unwrapped(x):
        raise NotImplementedError("a hook on an activation whose samples come later")
    return inner


@handles(torch.arange, torch.linspace)
def steps(run: Run, func: Callable, *args: Any, **kwargs: Any) -> T:
    """Where they begin and end decides the shape."""

    args, kwargs = map_tensors(lambda x: run.agree(x).item(), (args, kwargs))
    return func(*args, **kwargs)


@handles(T.new_zeros, T.new_ones, T.new_empty, T.narrow, torch.narrow)
def sized(run: Run, func: Callable, x: T, *args: Any, **kwargs: Any) -> T:
    """A shape that samples give."""
    args, kwargs = map_tensors(lambda x: int(run.agree(x)), (args, kwargs))
    return run.call(func, x, *args, **kwargs)
