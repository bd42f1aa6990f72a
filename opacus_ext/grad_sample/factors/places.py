"""Rows grouped by place, in ops that compiled code calls as they are.

The place of a row is ``sample * size + index``, where ``size`` is the number of
indices; the experts of a mixture are places, too. How many rows a place has depends on
the data, so a compiler can't look inside these ops: it knows shapes and derivatives.

- ``grouped_linear``: ``x[t] @ weight[places[t]]``, see rules/experts.py
- ``sum_by_place``: for each place the sum over its rows of ``left[t] (x) right[t]``,
  ``[count, left, right]``
- ``square_by_place``: the squared norm of such a sum, and what rounding may change,
  ``[2, count]``, for any number of factors; its kernel is in grad_sample.py

Rows are ``[rows, width]``, and places ``[rows]``.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch

from opacus_ext import private_torch
from opacus_ext.grad_sample.factors.rows import OneHot, dtype_of, square_sum

T = torch.Tensor
_LARGE = 128  # rows a group, on average, from which groups are multiplied one by one


def places_of(onehot: Sequence[OneHot]) -> tuple[T, int]:
    """Returns the place of each row, flattened, and ``size``."""
    index, size = onehot[0]
    for other in onehot[1:]:
        index, size = index * other.size + other.index, size * other.size
    samples = torch.arange(len(index), device=index.device)[:, None]
    return (samples * size + index).flatten(), size


def square_of_sums(rows: T, places: T, batch_size: int) -> T:
    """
    Sums the rows ``[rows, width]`` of each place, for equally many rows a sample;
    returns squared norms ``[B]``.
    """
    # One sum for each row, where the place is first in sorted order, the others zero:
    # the number of places would need a device sync.
    first = torch.searchsorted(places.sort().values, places)
    sums = rows.new_zeros(rows.shape).index_add_(0, first, rows)  # contiguous
    return square_sum(sums.view(batch_size, -1))


def groups_of(
    dense: Sequence[T], places: T, large: int = _LARGE
) -> Iterator[tuple[T | slice, list[T]]]:
    """
    Groups rows ``[rows, width]`` by place. Yields places and the factors of their rows
    ``[groups, rows, width]``, padded with zeros. Groups of similar size are yielded
    together, so that at most half of the entries are padding; groups of ``large`` or
    more rows on average are yielded one by one.
    """
    ranked, order = places.sort(stable=True)
    keys, counts = torch.unique_consecutive(ranked, return_counts=True)
    if len(order) >= large * len(keys):
        flat = [f.index_select(0, order) for f in dense]
        parts = zip(*(f.split(counts.tolist()) for f in flat))
        for key, part in zip(keys.tolist(), parts):
            yield slice(key, key + 1), [f[None] for f in part]
        return
    starts = counts.cumsum(0) - counts
    level = counts.float().log2().ceil()
    for i in level.unique().tolist():
        chosen = level == i
        step = torch.arange(int(counts[chosen].max()), device=places.device)
        inside = step < counts[chosen, None]
        # Padding is the group's own first row: others may not be finite.
        rows = order[starts[chosen, None] + step * inside]
        found = [f.index_select(0, rows.flatten()).view(*rows.shape, -1) for f in dense]
        narrow = min(range(len(dense)), key=lambda i: dense[i].shape[1])
        found[narrow] *= inside[..., None]
        yield keys[chosen], found


# -- ops -------------------------------------------------------------------------------
#
# Each has a kernel, which no compiler looks into, the shape of its result, and what the
# transforms of torch.func need.

library = torch.library.Library("opacus_ext", "FRAGMENT")
_ops = torch.ops.opacus_ext
# CUDA graphs can't record them, as they read the number of rows.
_tag = getattr(torch.Tag, "cudagraph_unsafe", None)
for _schema in (
    "grouped_linear(Tensor x, Tensor places, Tensor weight, bool transposed=False)",
    "sum_by_place(Tensor left, Tensor right, Tensor places, SymInt count)",
    "square_by_place(Tensor[] dense, Tensor places, SymInt count)",
):
    library.define(f"{_schema} -> Tensor", tags=() if _tag is None else (_tag,))


def kernel(name: str) -> Callable[[Callable], Callable]:
    """Registers the kernel of an op. It runs without autocast, and not under vmap."""

    def decorator(function: Callable) -> Callable:
        def run(*args: Any) -> T:
            with torch.autocast(args[1].device.type, enabled=False):
                return function(*args)

        library.impl(name, run, "CompositeExplicitAutograd")
        return function

    return decorator


@kernel("grouped_linear")
def _products(x: T, places: T, weight: T, transposed: bool = False) -> T:
    weight = weight.mT if transposed else weight
    order = places.argsort(stable=True)
    counts = torch.bincount(places, minlength=len(weight)).tolist()
    x, y, start = x.index_select(0, order), x.new_empty(len(x), weight.shape[2]), 0
    for w, count in zip(weight.unbind(), counts):
        if count:
            rows, start = slice(start, start + count), start + count
            torch.mm(x[rows], w, out=y[rows])
    y[start:] = 0
    return torch.empty_like(y).index_copy_(0, order, y)


@kernel("sum_by_place")
def _sums(left: T, right: T, places: T, count: int) -> T:
    found = left.new_zeros(count, left.shape[1], right.shape[1])
    large = 8 if places.device.type == "cpu" else _LARGE
    for keys, (f, g) in groups_of((left, right), places, large):
        if isinstance(keys, slice):
            torch.mm(f[0].mT, g[0], out=found[keys.start])
        else:
            found[keys] = torch.bmm(f.mT, g)
    return found


class _Products(private_torch.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: T, places: T, weight: T, transposed: bool = False) -> T:
        ctx.transposed = transposed
        ctx.save_for_backward(x, places, weight)
        with private_torch.below_autograd():
            return _ops.grouped_linear(x, places, weight, transposed)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple:
        x, places, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _ops.grouped_linear(grad, places, weight, not ctx.transposed)
        if ctx.needs_input_grad[2]:
            pair = (grad, x) if ctx.transposed else (x, grad)
            # One place more for the rows that have none.
            last = places.clamp(max=len(weight))
            of_weight = _ops.sum_by_place(*pair, last, len(weight) + 1)[:-1]
        return of_x, None, of_weight, None


class _Sums(private_torch.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, left: T, right: T, places: T, count: int) -> T:
        ctx.save_for_backward(left, right, places)
        with private_torch.below_autograd():
            return _ops.sum_by_place(left, right, places, count)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple:
        left, right, places = ctx.saved_tensors
        of_left = _ops.grouped_linear(right, places, grad, True)
        return of_left, _ops.grouped_linear(left, places, grad), None, None


def _differentiable(function: Any) -> Callable:
    """Applies an autograd function at one level of torch.func, as torch's ops are."""

    def run(*args: Any) -> T:
        with private_torch.enable_single_level_autograd_function():
            return function.apply(*args)

    return run


library.impl("grouped_linear", _differentiable(_Products), "Autograd")
library.impl("sum_by_place", _differentiable(_Sums), "Autograd")


def _batched(info: Any, in_dims: tuple, given: Sequence[T]) -> list[T]:
    return [
        y.expand(info.batch_size, *y.shape) if dim is None else y.movedim(dim, 0)
        for y, dim in zip(given, in_dims)
    ]


def _products_of_samples(info: Any, in_dims: tuple, *given: Any) -> tuple[T, int]:
    """The rule of vmap: multiplies all rows at once, also by weights of each sample."""
    x, places, weight = _batched(info, in_dims, given[:3])
    shape, size = x.shape[:2], weight.shape[1]
    if in_dims[2] is None:
        weight = given[2]
    else:
        first = size * torch.arange(len(x), device=x.device)[:, None]
        places = torch.where(places < size, places + first, size * len(x))
        weight = weight.flatten(0, 1)
    flat = x.flatten(0, 1), places.flatten(), weight
    return _ops.grouped_linear(*flat, *given[3:]).unflatten(0, shape), 0


def _sums_of_samples(info: Any, in_dims: tuple, *given: Any) -> tuple[T, int]:
    *rows, count = given
    left, right, places = _batched(info, in_dims, rows)
    places = places + count * torch.arange(len(left), device=left.device)[:, None]
    flat = (y.flatten(0, 1) for y in (left, right, places))
    found = _ops.sum_by_place(*flat, count * len(left))
    return found.unflatten(0, (len(left), count)), 0


for name, rule in (
    ("grouped_linear", _products_of_samples),
    ("sum_by_place", _sums_of_samples),
):
    torch.library.register_vmap(f"opacus_ext::{name}", rule, lib=library)


@torch.library.register_fake("opacus_ext::grouped_linear", lib=library)
def _(x: T, places: T, weight: T, transposed: bool = False) -> T:
    return x.new_empty(len(x), weight.shape[1 if transposed else 2])


@torch.library.register_fake("opacus_ext::sum_by_place", lib=library)
def _(left: T, right: T, places: T, count: int) -> T:
    return left.new_empty(count, left.shape[1], right.shape[1])


@torch.library.register_fake("opacus_ext::square_by_place", lib=library)
def _(dense: Sequence[T], places: T, count: int) -> T:
    return places.new_empty(2, count, dtype=dtype_of(*(f.dtype for f in dense)))
