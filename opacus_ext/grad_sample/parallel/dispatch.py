"""Tokens travel to the process that holds their expert, and back."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample.rules import as_op, handles
from opacus_ext.grad_sample.rules.experts import experts_interface

T = torch.Tensor


class _Exchange(torch.autograd.Function):
    """
    Rows travel, and their gradient travels back, in every process or in none: so it
    hangs on an anchor, whatever else it does.
    """

    @staticmethod
    def forward(ctx, group, rows, send, receive, anchor):
        ctx.group, ctx.back = group, (receive, send)
        return group.exchange(rows, send, receive)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.group.exchange(grad, *ctx.back), None, None, None


def _dispatch(
    x: T,
    index: T,
    layer: Any,
    compute: Callable[[T, T, T], T],
    anchor: Optional[T] = None,
) -> T:
    """
    Sends rows to the processes that hold their experts, and the results back.

    Args:
        x: ``[tokens * choices, width]``, sample after sample
        index: the expert of each row; rows of none stay here and give zero
        compute: what the experts here make of rows, given the sample of each row,
            counted through those of all processes, and its expert, counted through
            those of this process
        anchor: requires a gradient, in all processes or in none
    """
    group, place, count, _ = layer.sharding
    each = count // group.size
    owner = index // each
    travels = (owner < group.size).nonzero()[:, 0]
    order = travels[owner[travels].argsort(stable=True)]
    send = torch.bincount(owner[order], minlength=group.size).tolist()
    receive = group.meet(place, send)
    per_sample = max(1, len(x) // max(1, group.batch_sizes[group.rank]))
    sample = order // per_sample + group.own_samples.start
    numbers = torch.stack([sample, index[order] % each], dim=1)
    samples, expert = group.exchange(numbers, send, receive).unbind(1)
    rows = _Exchange.apply(group, x[order], send, receive, anchor)
    y = compute(rows, samples, expert).to(rows.dtype) if len(rows) else rows
    group.meet(place)
    y = _Exchange.apply(group, y, receive, send, rows)
    return y.new_zeros(x.shape).index_copy(0, order, y)


def _stacked(layer: Any, rows: T, expert: T) -> T:
    ones = torch.ones_like(rows[..., :1])
    return experts_interface(layer, rows, expert[..., None], ones)


@as_op
def through_experts(x: T, index: T, layer: Any) -> T:
    """
    Every row through its expert, wherever that is.

    Args:
        x: ``[rows, width]``
        index: ``[rows]``; as many as there are experts, or more, for none

    Returns:
        ``[rows, width]``, zero where there is no expert.
    """

    def compute(rows: T, samples: T, expert: T) -> T:
        if not isinstance(layer, nn.ModuleDict):
            return _stacked(layer, rows, expert)
        y = torch.zeros_like(rows)
        for i, run in enumerate(layer.values()):
            mine = (expert == i).nonzero()[:, 0]
            if len(mine):
                y = y.index_copy(0, mine, run(rows[mine]).to(y.dtype))
        return y

    if layer.sharding.group.silent:
        return torch.zeros_like(x)
    return _dispatch(x, index, layer, compute)


@handles(through_experts)
def _by_sample(group: Any, func: Callable, x: T, index: T, layer: Any) -> T:
    """The samples of this process, and here the gradients of all that came."""
    x, index = group.own(x), group.inner(index)
    processes, count = layer.sharding.group, layer.sharding.experts
    size = processes.batch_size

    def compute(rows: T, samples: T, expert: T) -> T:
        if not isinstance(layer, nn.ModuleDict):
            x, place, _ = _padded(rows, samples, size)
            index = expert.new_full(x.shape[:2], count)
            index[samples, place] = expert
            stacked = functools.partial(_stacked, layer)
            return group.of_others(stacked, (x, index), size)[samples, place]
        y = torch.zeros_like(rows)
        for i, run in enumerate(layer.values()):
            mine = (expert == i).nonzero()[:, 0]
            x, place, counts = _padded(rows[mine], samples[mine], size)
            for n in set(counts.tolist()) - {0}:  # a sample's rows, and no others
                some = (counts == n).nonzero()[:, 0]
                found = group.of_others(run, (x[some, :n],), size, some)
                x = x.index_put((some[:, None], torch.arange(n).to(some)), found)
            y = y.index_copy(0, mine, x[samples[mine], place])
        return y

    with group.outside():
        x = group.inner(x)
        if not processes.batch_sizes[processes.rank]:  # what runs is no sample
            index = torch.full_like(index, count)
        # A use of no parameter, to which the gradient goes all the same.
        anchor = group.note(x.new_zeros(group.size), (), tuple, 0, (), ())
        rows = x.flatten(0, 1), index.flatten()
        y = _dispatch(*rows, layer, compute, group.inner(anchor))
        return group.wrap(y.view(x.shape))


def _padded(rows: T, samples: T, size: int) -> Tuple[T, T, T]:
    """
    Rows, sample after sample, as ``[size, longest, width]``, the place of each among
    those of its sample, and how many each sample has.
    """
    counts = torch.bincount(samples, minlength=size)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(samples)).to(first) - first[samples]
    wide = rows.new_zeros(size, int(counts.max()), rows.shape[1])
    return wide.index_put((samples, place), rows), place, counts
