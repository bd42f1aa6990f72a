"""Rows grouped by place, in ops that compiled code calls as they are.

The place of a row is ``sample * size + index``, where ``size`` is the number of
indices; the experts of a mixture are places, too. How many rows a place has depends on
the data, so a compiler can't look inside these ops: it knows shapes and derivatives.

- ``grouped_linear``: ``x[t] @ weight[places[t]]``, see rules/experts.py; by a product
  for each place, or by one of all places, padded to the most rows that one has
- ``sum_by_place``: for each place the sum over its rows of ``left[t] (x) right[t]``,
  ``[count, left, right]``
- ``square_by_place``: the squared norm of such a sum, and what rounding may change,
  ``[2, count]``, for any number of factors; its kernel is in grad_sample.py

Rows are ``[rows, width]``, and places ``[rows]``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import torch

from opacus_ext import private_torch
from opacus_ext.grad_sample.factors.rows import (
    OneHot,
    common_dtype,
    square_sum,
    workspace,
)

T = torch.Tensor
# Groups of so many rows on average, or more, are multiplied one by one.
_LARGE = 128
# Devices that add rows with the same place one after another. If a place has at least
# so many rows, one-hot rows are multiplied instead, in at most so many blocks.
_ONE_BY_ONE = {"cuda"}
_CROWD = 16
_MOST_BLOCKS = 16


def _first_places(samples: T, count: int) -> T:
    """Returns the first of the ``count`` places of each sample, ``[B, 1]``."""
    numbers = torch.arange(len(samples), device=samples.device)
    return count * numbers.unsqueeze(1)


def index_of(onehot: Sequence[OneHot]) -> tuple[T, int]:
    """Returns the index ``[B, T]`` of rows in a table of several axes, and ``size``."""
    index, size = onehot[0]
    for other in onehot[1:]:
        index = index * other.size + other.index
        size *= other.size
    return index, size


def places_of(onehot: Sequence[OneHot]) -> tuple[T, int]:
    """Returns the place of each row, flattened, and ``size``."""
    index, size = index_of(onehot)
    places = _first_places(index, size) + index
    return places.flatten(), size


def is_crowded(index: T, size: int) -> bool:
    """
    Returns True if rows with an index ``[B, T]`` would wait for each other: a GPU adds
    those that have the same place one after another.
    """
    if index.device.type not in _ONE_BY_ONE or torch.compiler.is_compiling():
        return False
    if index.shape[1] < _CROWD * size:
        return False
    return index.numel() * size * 4 <= _MOST_BLOCKS * workspace()


def add_by_index(table: T, index: T, rows: T) -> T:
    """Adds rows ``[B, T, width]`` to ``table [B, size, width]`` at ``index [B, T]``."""
    size = table.shape[1]
    if not is_crowded(index, size):
        first = size * torch.arange(len(index), device=index.device)
        places = (first[:, None] + index).flatten()
        table.flatten(0, 1).index_add_(0, places, rows.flatten(0, 1))
        return table
    numbers = torch.arange(size, device=index.device)
    step = max(1, workspace() // max(1, table[..., 0].numel() * rows.dtype.itemsize))
    for start in range(0, index.shape[1], step):
        block = slice(start, start + step)
        onehot = index[:, block, None] == numbers
        table.baddbmm_(onehot.to(rows.dtype).mT, rows[:, block])
    return table


def square_of_sums(rows: T, places: T, batch_size: int) -> T:
    """
    Sums the rows ``[rows, width]`` of each place, for equally many rows a sample;
    returns squared norms ``[B]``.
    """
    # There are as many sums as rows, as the number of places would need a device sync.
    # A sum stands where its place is first in sorted order; the other rows stay zero.
    first = torch.searchsorted(places.sort().values, places)
    sums = rows.new_zeros(rows.shape).index_add_(0, first, rows)
    return square_sum(sums.view(batch_size, -1))


def groups_of(
    dense: Sequence[T],
    places: T,
    large: int = _LARGE,
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
        sizes = counts.tolist()
        columns = [rows.index_select(0, order).split(sizes) for rows in dense]
        for key, *group in zip(keys.tolist(), *columns):
            yield slice(key, key + 1), [rows[None] for rows in group]
        return
    starts = counts.cumsum(0) - counts
    levels = counts.float().log2().ceil()
    widths = [rows.shape[1] for rows in dense]
    for level in levels.unique().tolist():
        chosen = levels == level
        most = int(counts[chosen].max())
        step = torch.arange(most, device=places.device)
        inside = step < counts[chosen, None]
        # Padding is the group's own first row: others may not be finite.
        numbers = order[starts[chosen, None] + step * inside]
        factors = []
        for rows in dense:
            selected = rows.index_select(0, numbers.flatten())
            factors.append(selected.view(*numbers.shape, -1))
        # Zeros in one factor suffice, and take the least time in the narrowest.
        factors[widths.index(min(widths))] *= inside[..., None]
        yield keys[chosen], factors


# -- ops -------------------------------------------------------------------------------
#
# Each has a kernel, which no compiler looks into, the shape of its result, and what the
# transforms of torch.func need.

library = torch.library.Library("opacus_ext", "FRAGMENT")
_ops = torch.ops.opacus_ext
# CUDA graphs can't record them, as they read the number of rows.
_tag = getattr(torch.Tag, "cudagraph_unsafe", None)
_tags = () if _tag is None else (_tag,)
for _schema in (
    "grouped_linear(Tensor x, Tensor places, Tensor weight, bool transposed=False, "
    "bool padded=False)",
    "sum_by_place(Tensor left, Tensor right, Tensor places, SymInt count)",
    "square_by_place(Tensor[] dense, Tensor places, SymInt count)",
):
    library.define(f"{_schema} -> Tensor", tags=_tags)


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
def _products(
    inputs: T,
    places: T,
    weight: T,
    transposed: bool = False,
    padded: bool = False,
) -> T:
    if transposed:
        weight = weight.mT
    size = len(weight)
    counts = torch.bincount(places, minlength=size)[:size].tolist()
    # The last rows in order belong to no place.
    order = places.argsort(stable=True)[: sum(counts)]
    multiply = _products_padded if padded else _products_one_by_one
    products = multiply(inputs.index_select(0, order), counts, weight)
    outputs = products.new_zeros(len(inputs), weight.shape[2])
    return outputs.index_copy_(0, order, products)


def _products_one_by_one(
    rows: T,
    counts: Sequence[int],
    weight: T,
) -> T:
    """Multiplies the next ``counts[i]`` rows by matrix i, for each i."""
    outputs = rows.new_empty(len(rows), weight.shape[2])
    start = 0
    for matrix, count in zip(weight.unbind(), counts):
        if count:
            block = slice(start, start + count)
            torch.mm(rows[block], matrix, out=outputs[block])
            start += count
    return outputs


def _products_padded(
    rows: T,
    counts: Sequence[int],
    weight: T,
) -> T:
    """Does the same in one product, with zeros below the rows of a matrix."""
    lengths = torch.tensor(counts, device=rows.device)
    step = torch.arange(max(counts, default=0), device=rows.device)
    is_row = step < lengths.unsqueeze(1)
    blocks = rows.new_zeros(*is_row.shape, rows.shape[1])
    blocks[is_row] = rows
    return torch.bmm(blocks, weight)[is_row]


@kernel("sum_by_place")
def _sums(
    left: T,
    right: T,
    places: T,
    count: int,
) -> T:
    sums = left.new_zeros(count, left.shape[1], right.shape[1])
    # A CPU has no kernels to launch: padding costs it more than many small products.
    large = 8 if places.device.type == "cpu" else _LARGE
    for keys, (first, second) in groups_of((left, right), places, large):
        if isinstance(keys, slice):
            torch.mm(first[0].mT, second[0], out=sums[keys.start])
        else:
            sums[keys] = torch.bmm(first.mT, second)
    return sums


@contextmanager
def _level_below() -> Iterator[None]:
    """
    Leaves out autograd at this level of torch.func. The levels below have theirs, which
    would record nothing, as torch runs the forward of a function without gradients.
    """
    with torch.enable_grad(), private_torch.below_autograd():
        yield


class _Products(private_torch.SingleLevelFunction):
    @staticmethod
    def forward(
        context: Any,
        inputs: T,
        places: T,
        weight: T,
        transposed: bool = False,
        padded: bool = False,
    ) -> T:
        context.transposed, context.padded = transposed, padded
        context.save_for_backward(inputs, places, weight)
        with _level_below():
            return _ops.grouped_linear(inputs, places, weight, transposed, padded)

    @staticmethod
    def backward(context: Any, grad: T) -> tuple:
        inputs, places, weight = context.saved_tensors
        layout = not context.transposed, context.padded
        of_x = of_weight = None
        if context.needs_input_grad[0]:
            of_x = _ops.grouped_linear(grad, places, weight, *layout)
        if context.needs_input_grad[2]:
            # The rows that have no place are summed behind the last one.
            count = len(weight)
            places = places.clamp(max=count)
            pair = (grad, inputs) if context.transposed else (inputs, grad)
            of_weight = _ops.sum_by_place(*pair, places, count + 1)[:count]
        return of_x, None, of_weight, None, None


class _Sums(private_torch.SingleLevelFunction):
    @staticmethod
    def forward(
        context: Any,
        left: T,
        right: T,
        places: T,
        count: int,
    ) -> T:
        context.save_for_backward(left, right, places)
        with _level_below():
            return _ops.sum_by_place(left, right, places, count)

    @staticmethod
    def backward(context: Any, grad: T) -> tuple:
        left, right, places = context.saved_tensors
        of_left = _ops.grouped_linear(right, places, grad, True)
        of_right = _ops.grouped_linear(left, places, grad)
        return of_left, of_right, None, None


def _differentiable(function: Any, op: Callable) -> Callable:
    """Applies an autograd function at one level of torch.func, as torch's ops are."""

    def run(*args: Any) -> T:
        if not torch.is_grad_enabled():
            # Then the levels below are to record nothing, either.
            with private_torch.below_autograd():
                return op(*args)
        with private_torch.enable_single_level_autograd_function():
            return function.apply(*args)

    return run


for _name, _function in (("grouped_linear", _Products), ("sum_by_place", _Sums)):
    _run = _differentiable(_function, getattr(_ops, _name))
    library.impl(_name, _run, "Autograd")


def _batched(
    info: Any,
    in_dims: tuple,
    tensors: Sequence[T],
) -> list[T]:
    """Returns the tensors of all samples; those that samples share are expanded."""
    batched = []
    for tensor, dim in zip(tensors, in_dims):
        if dim is None:
            batched.append(tensor.expand(info.batch_size, *tensor.shape))
        else:
            batched.append(tensor.movedim(dim, 0))
    return batched


@torch.library.register_vmap("opacus_ext::grouped_linear", lib=library)
def _products_of_samples(
    info: Any,
    in_dims: tuple,
    *args: Any,
) -> tuple[T, int]:
    """The rule of vmap: multiplies all rows at once, also by weights of each sample."""
    inputs, places, weights = _batched(info, in_dims, args[:3])
    weight, count = args[2], weights.shape[1]
    if in_dims[2] is not None:
        # A place behind all others stays so: its row has no weight.
        is_inside = places < count
        last = count * len(inputs)
        places = torch.where(is_inside, places + _first_places(places, count), last)
        weight = weights.flatten(0, 1)
    rows = inputs.flatten(0, 1)
    products = _ops.grouped_linear(rows, places.flatten(), weight, *args[3:])
    return products.unflatten(0, inputs.shape[:2]), 0


@torch.library.register_vmap("opacus_ext::sum_by_place", lib=library)
def _sums_of_samples(
    info: Any,
    in_dims: tuple,
    *args: Any,
) -> tuple[T, int]:
    *tensors, count = args
    left, right, places = _batched(info, in_dims, tensors)
    size = len(left)
    places = places + _first_places(places, count)
    rows = [tensor.flatten(0, 1) for tensor in (left, right, places)]
    sums = _ops.sum_by_place(*rows, count * size)
    return sums.unflatten(0, (size, count)), 0


@torch.library.register_fake("opacus_ext::grouped_linear", lib=library)
def _(
    inputs: T,
    places: T,
    weight: T,
    transposed: bool = False,
    padded: bool = False,
) -> T:
    if transposed:
        weight = weight.mT
    return inputs.new_empty(len(inputs), weight.shape[2])


@torch.library.register_fake("opacus_ext::sum_by_place", lib=library)
def _(
    left: T,
    right: T,
    places: T,
    count: int,
) -> T:
    return left.new_empty(count, left.shape[1], right.shape[1])


@torch.library.register_fake("opacus_ext::square_by_place", lib=library)
def _(
    dense: Sequence[T],
    places: T,
    count: int,
) -> T:
    return places.new_empty(2, count, dtype=common_dtype(dense))
