"""Experts in a run of samples: on whole batches, with the sample of each row known."""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch
from torch import nn

from opacus_ext.grad_sample.parallel.dispatch import (
    rows_through_experts,
    through_experts,
)
from opacus_ext.grad_sample.rules.experts import (
    Experts,
    Routes,
    by_table,
    expert_factors,
    expert_linear,
    send,
    send_rows,
)
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.native import copies
from opacus_ext.grad_sample.samplewise.ops import handles
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.uses import RowTable, Use

T = torch.Tensor


@handles(expert_linear)
def _expert_linear(
    run: Run,
    func: Callable,
    x: T,
    routes: Routes,
    weight: T,
    bias: Optional[T] = None,
    transposed: bool = False,
) -> T:
    if is_batched(weight) or (bias is not None and is_batched(bias)):
        raise NotImplementedError("experts of each sample")
    inner = run.inner(x)  # [rows, 1, in]
    roots, shared = [], []
    for p in (weight, bias):
        noted = p is not None and p.requires_grad and torch.is_grad_enabled()
        roots.append(run.root(p) if noted else None)
        shared.append(roots[-1].shared if noted else p)
    with run.outside():
        y = func(inner.flatten(0, 1), routes, *shared, transposed)
        y = y.unflatten(0, inner.shape[:2])
    if any(roots):
        factors = functools.partial(expert_factors, len(weight), transposed)
        use = Use(run, tuple(roots), factors, 1, (1, 1))
        y = run.note_whole(y, use, [routes.index.view(inner.shape[:2]), inner])
    return run.level.wrap(y)


@handles(send)
def _send(run: Run, func: Callable, x: T, index: T, size: int, experts: Experts) -> T:
    def sent(rows: T, index: T) -> T:
        each = max(1, len(rows) // max(1, run.size))  # rows a sample

        def here(function: Callable, some: T, which: T) -> T:
            return on_rows(run, function, some, which // each, run.size)

        return send_rows(rows, index, size, experts, here)

    return _outside(run, x, index, sent)


@handles(through_experts)
def _through_experts(run: Run, func: Callable, x: T, index: T, layer: nn.Module) -> T:
    anchor = run.engine.anchor if torch.is_grad_enabled() else None

    def here(function: Callable, rows: T, samples: T) -> T:
        return on_rows(run, function, rows, samples, layer.sharding.group.batch_size)

    def sent(rows: T, index: T) -> T:
        return rows_through_experts(rows, index, layer, here, anchor)

    return _outside(run, x, index, sent)


def _outside(run: Run, x: T, index: T, sent: Callable[[T, T], T]) -> T:
    """Rows of all samples, one sample after the other."""
    if run.dispatching:
        raise NotImplementedError("experts inside of experts")
    x, index = run.inner(copies(run, x)), run.inner(index)
    with run.outside():
        y = sent(x.flatten(0, -2), index.flatten())
        return run.level.wrap(y.view(x.shape))


def on_rows(run: Run, function: Callable, rows: T, samples: T, size: int) -> T:
    """
    A function of rows of known samples, each by itself.

    Args:
        rows: ``[rows, width]``
        samples: of each
        size: how many samples these are numbers of

    Returns:
        ``[rows, width]``
    """
    with run.dispatched(RowTable(samples, size, by_table)) as level:
        y = level.unwrap(function(level.wrap(rows.unsqueeze(1))))
    return y.flatten(0, 1)
